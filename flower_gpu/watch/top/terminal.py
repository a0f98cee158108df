"""The live view of ``flower-gpu top``: take a snapshot, draw it on the whole terminal, wait for keys.

The view must restore the terminal however it ends: with ``q``, with a signal, or because the terminal is
closed. Three objects take part:

- :func:`run` is the loop, on the main thread. It takes one snapshot per interval. While a long trace is being
  read, each slice of ``_READ_S`` is followed by a snapshot and a check for keys, so the view stays
  responsive.
- :class:`Terminal` owns the screen, the mode of the keyboard, and the signal handlers. Leaving its context
  restores all three.
- :class:`Browsing` holds the scroll position and the sort order, and changes them when a key is pressed.

A signal can arrive in the middle of an escape sequence. A handler that wrote to the terminal at that moment
would leave broken output. So the handlers do nothing: :func:`signal.set_wakeup_fd` makes Python write the
number of the signal into a pipe. :meth:`Terminal.wait` waits for the keyboard and this pipe together, and
acts on signals between two drawings. SIGINT, SIGTERM and SIGHUP set ``status``, which ends the loop
in :func:`run`.

Ctrl-Z stops the process with the default action of SIGTSTP. The terminal is restored before, and taken over
again after the process continues. SIGINT, SIGTERM and SIGHUP stay ignored if they were ignored at the start,
as under nohup.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import termios
import time
import tty
from contextlib import suppress
from types import FrameType
from typing import Final

from flower_gpu.polling import readable
from flower_gpu.watch.followed_run import FollowedRuns
from flower_gpu.watch.top.browsing import Browsing, keys_of
from flower_gpu.watch.top.lines import coloured
from flower_gpu.watch.top.snapshot import Snapshot, take_snapshot
from flower_gpu.watch.top.view import Size, draw

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds for which traces are read before the view checks for keys again.
_READ_S: Final = 0.05
#: Interval in seconds at which the view is redrawn, so that it follows the size of the terminal.
_RESIZED_S: Final = 0.5
#: Escape sequences that switch to the alternate screen and hide the cursor, and that undo both.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def run(runs: FollowedRuns, interval_s: float) -> int:
    """Show the view, and return the exit status: 0 after ``q``, otherwise 128 plus the signal's number."""
    with Terminal() as terminal:
        while terminal.status is None:
            next_at = time.monotonic() + interval_s
            shown = runs.look()
            is_all_read = runs.read_on(time.monotonic() + _READ_S)
            snapshot = take_snapshot(shown, others=runs.are_all)
            terminal.show(snapshot)
            terminal.wait(0)
            # Wait for the next snapshot only if all traces are read. Otherwise continue reading at once.
            while terminal.status is None and is_all_read and (left_s := next_at - time.monotonic()) > 0:
                terminal.show(snapshot)
                terminal.wait(min(left_s, _RESIZED_S))
        return terminal.status


class Terminal:
    """The whole screen of a terminal. As a context manager it restores the terminal on every exit.

    ``status``: exit status of this process after ``q`` or a signal; None while the view continues.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self._browsing = Browsing()
        self._keyboard = sys.stdin.fileno()
        self._previous_settings = termios.tcgetattr(self._keyboard)
        self._is_ascii = not "█▒▚▬·°…▲▼".encode(sys.stdout.encoding, errors="ignore")
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)

    def __enter__(self) -> Terminal:
        self._signals = {
            number: signal.signal(number, self._on_signal)
            for number in (*_ENDING, signal.SIGTSTP)
            # nohup ignores SIGHUP, and a shell ignores SIGINT for jobs in the background. Keep that.
            if number not in _ENDING or signal.getsignal(number) != signal.SIG_IGN
        }
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._take_screen()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave_screen()
        signal.set_wakeup_fd(-1)
        for number, handler in self._signals.items():
            # A write to a terminal that is being closed may fail before SIGHUP arrives. That signal must not
            # end this process, whose exit status already tells the reason.
            is_late = number == signal.SIGHUP and self.status == 128 + signal.SIGHUP
            signal.signal(number, signal.SIG_IGN if is_late else handler)

    def show(self, snapshot: Snapshot) -> None:
        """Draw a snapshot on the whole screen."""
        width, height = self._size()
        lines = draw(snapshot, Size(width, height, self._is_ascii), self._browsing)
        # Overwrite the previous lines instead of clearing the screen first, because clearing flickers.
        drawn = "\r\n".join(f"{coloured(line)}\x1b[K" for line in lines)
        self._write(f"\x1b[H{drawn}\x1b[J")

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` for keys or signals, and act on them."""
        ready = readable([self._keyboard, self._wake], max(0.0, seconds))
        if self._wake in ready:
            self._obey(os.read(self._wake, 4096))
        if self._keyboard in ready:
            with suppress(OSError):
                if keys := os.read(self._keyboard, 4096):
                    self._press(keys)
                    return
            # The read failed or returned no data, so the terminal has been closed.
            self._end(128 + signal.SIGHUP)

    def _press(self, keys: bytes) -> None:
        for key in keys_of(keys):
            if key.lower() == b"q":
                self._end(0)
            else:
                self._browsing.press(key)

    def _obey(self, signals: bytes) -> None:
        for number in signals:
            if number in _ENDING:
                self._end(128 + number)
            elif number == signal.SIGTSTP:
                self._suspend()

    def _end(self, status: int) -> None:
        self.status = status if self.status is None else self.status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Do nothing. The wake-up pipe ends :meth:`wait`, which acts on the signal between two drawings."""

    def _suspend(self) -> None:
        """Restore the terminal, stop this process, and take over the screen when the process continues."""
        self._leave_screen()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._take_screen()

    def _size(self) -> tuple[int, int]:
        """Return the width in cells and the height in lines of the terminal now.

        ``COLUMNS`` and ``LINES`` can be outdated, because they hold the size when they were exported. So they
        are used only if the terminal itself reports no size.
        """
        with suppress(OSError):
            width, height = os.get_terminal_size(sys.stdout.fileno())
            if width and height:
                return width, height
        return shutil.get_terminal_size()

    def _take_screen(self) -> None:
        tty.setcbreak(self._keyboard, termios.TCSANOW)
        self._write(_ENTER)

    def _leave_screen(self) -> None:
        self._write(_LEAVE)
        with suppress(termios.error):
            termios.tcsetattr(self._keyboard, termios.TCSANOW, self._previous_settings)

    def _write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:
            # The terminal has been closed. Python flushes stdout again at exit, which must not fail.
            self._end(128 + signal.SIGHUP)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
