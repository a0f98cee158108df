"""The live view: looks, draws on all of the terminal, waits for keys, and leaves the terminal as it was."""

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
from flower_gpu.watch.top.snapshot import Snapshot, take
from flower_gpu.watch.top.view import Size, draw

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ_S: Final = 0.05  # so long at a time a trace is read before keys are looked at again
_RESIZED_S: Final = 0.5  # so often the size of the terminal is looked at
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen, without a cursor, and back


def run(runs: FollowedRuns, interval_s: float) -> int:
    """Show the view, and return the exit status: 0 after ``q``, else 128 and the signal's number."""
    with Terminal() as terminal:
        while terminal.status is None:
            next_at = time.monotonic() + interval_s
            shown = runs.look()
            is_all_read = runs.read_on(time.monotonic() + _READ_S)
            snapshot = take(shown, others=runs.are_all)
            terminal.show(snapshot)
            terminal.wait(0)
            # A long trace is read on while there is nothing else to do.
            while terminal.status is None and is_all_read and (left_s := next_at - time.monotonic()) > 0:
                terminal.show(snapshot)
                terminal.wait(min(left_s, _RESIZED_S))
        return terminal.status


class Terminal:
    """The whole screen of a terminal; a context manager that gives it back as it was, whatever happens.

    ``status``: how this process is to end, once it is asked to.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self._browsing = Browsing()
        self._keyboard = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._keyboard)
        self._is_ascii = not "█▒▚▬·°…▲▼".encode(sys.stdout.encoding, errors="ignore")
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)

    def __enter__(self) -> Terminal:
        self._signals = {
            number: signal.signal(number, self._on_signal)
            for number in (*_ENDING, signal.SIGTSTP)
            if number not in _ENDING or signal.getsignal(number) != signal.SIG_IGN  # nohup
        }
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._take_screen()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave_screen()
        signal.set_wakeup_fd(-1)
        for number, handler in self._signals.items():
            signal.signal(number, handler)

    def show(self, snapshot: Snapshot) -> None:
        """Draw a snapshot on all of the screen."""
        width, height = self._size()
        lines = draw(snapshot, Size(width, height, self._is_ascii), self._browsing)
        # Each line is written over what was there, so that nothing flickers.
        drawn = "\r\n".join(f"{coloured(one)}\x1b[K" for one in lines)
        self._write(f"\x1b[H{drawn}\x1b[J")

    def wait(self, seconds: float) -> None:
        """Wait for keys and signals, and do what they ask for."""
        ready = readable([self._keyboard, self._wake], max(0.0, seconds))
        if self._wake in ready:
            self._obey(os.read(self._wake, 4096))
        if self._keyboard in ready:
            with suppress(OSError):
                if keys := os.read(self._keyboard, 4096):
                    self._press(keys)
                    return
            self._end(128 + signal.SIGHUP)  # its other side is gone

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
        """Nothing here: the wait ends, and obeys. A signal may come within an escape sequence."""

    def _suspend(self) -> None:
        """Stop as Ctrl-Z asks for, with the terminal as it was; take it again when this goes on."""
        self._leave_screen()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._take_screen()

    def _size(self) -> tuple[int, int]:
        """Return how many cells and lines there are now.

        ``COLUMNS`` and ``LINES`` say what there was when they were exported. They count where the terminal
        itself knows no size.
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
            termios.tcsetattr(self._keyboard, termios.TCSANOW, self._before)

    def _write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:  # nobody is there any more who would see it; Python writes once more at its end
            self._end(128 + signal.SIGHUP)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
