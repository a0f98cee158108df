"""The live view: looks, draws on all of the terminal, waits for keys and signals, and leaves it as it was."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import termios
import time
import tty
from contextlib import ExitStack, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.watch.top.browsing import Browsing, keys_of
from flower_gpu.watch.top.past import Past
from flower_gpu.watch.top.view import Frame
from flower_gpu.watch.top.watcher import Watcher

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_WAIT_S: Final = 3600.0  # at once: the kernel takes at most 24 days
_READ_S: Final = 0.05  # so long at a time a trace is read before keys are looked at again


def run(watcher: Watcher, interval_s: float) -> int:
    """Show what happens, and return the exit status: 0 after ``q``, else 128 and the signal's number."""
    past = Past(interval_s)
    with Terminal() as terminal:
        keys = "q quits" if terminal.has_keys else "Ctrl-C quits"
        browsing = terminal.browsing if terminal.has_keys else None
        while not terminal.is_over:
            next_at = time.monotonic() + interval_s
            watcher.look_for_runs()
            is_all_read = watcher.read_on(_READ_S)
            snapshot = watcher.take()
            past.add(snapshot)
            frame = Frame(snapshot, keys, past=past, browsing=browsing)
            terminal.show(frame)
            while not terminal.is_over and (left_s := next_at - time.monotonic()) > 0:
                # A long trace is read on while there is nothing else to do.
                if terminal.wait(left_s if is_all_read else 0):
                    terminal.show(frame)  # its size may be another one
                elif not is_all_read:
                    is_all_read = watcher.read_on(min(_READ_S, left_s))
    return 0 if terminal.is_quit or terminal.ended_by is None else 128 + terminal.ended_by


class Terminal:
    """The whole screen of a terminal; a context manager that gives it back as it was, whatever happens.

    ``ended_by``: the signal that has asked this process to end.
    ``is_quit``: whether the key ``q`` was pressed.
    ``browsing``: what other keys have chosen.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self.ended_by: int | None = None
        self.is_quit = False
        self.browsing = Browsing()
        self._is_suspended = False
        self._keyboard = sys.stdin.fileno() if _is_terminal(sys.stdin) else -1
        self._console = Console(file=sys.stdout, highlight=False)
        self._screen = ExitStack()  # gives the screen back
        self._all = ExitStack()  # gives all back

    def __enter__(self) -> Terminal:
        with ExitStack() as stack:
            self._wake, ours = socket.socketpair()
            for end in (stack.enter_context(self._wake), stack.enter_context(ours)):
                end.setblocking(False)
            before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
            stack.callback(signal.set_wakeup_fd, before)
            handlers = dict.fromkeys(_ENDING, self._on_end)
            handlers |= {signal.SIGWINCH: self._on_change, signal.SIGTSTP: self._on_stop}
            for number, handler in handlers.items():
                if number not in _ENDING or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                    stack.callback(signal.signal, number, signal.signal(number, handler))
            stack.callback(lambda: self._screen.close())
            self._take_screen()
            self._all = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._all.close()

    @property
    def has_keys(self) -> bool:
        """Whether there is a keyboard."""
        return self._keyboard >= 0

    @property
    def is_over(self) -> bool:
        """Whether it was asked to end."""
        return self.is_quit or self.ended_by is not None

    def show(self, shown: RenderableType) -> None:
        """Draw this on all of the screen."""
        try:
            self._console.size = self._size()
            self._live.update(shown, refresh=True)
        except OSError:  # its connection is lost, and the signal that tells is under way
            self.ended_by = self.ended_by or signal.SIGHUP

    def _size(self) -> tuple[int, int]:
        """Return how many cells and lines there are now.

        ``COLUMNS`` and ``LINES``, which rich goes by first, say what there was when they were exported. They
        count where the terminal itself knows no size.
        """
        width, height = os.get_terminal_size(sys.stdout.fileno())
        return (width, height) if width and height else self._console.size

    def wait(self, seconds: float) -> bool:
        """Wait for a key or a signal; tell whether there was one, so that all should be drawn anew."""
        sources = [self._wake.fileno(), *([self._keyboard] if self.has_keys else [])]
        ready, _, _ = select.select(sources, [], [], max(0.0, min(seconds, _MAX_WAIT_S)))
        if self._wake.fileno() in ready:
            with suppress(BlockingIOError):
                self._wake.recv(4096)
        if self._keyboard in ready:
            self._read_keys()
        if self._is_suspended and not self.is_over:
            self._suspend()
        return bool(ready)

    def _read_keys(self) -> None:
        try:
            data = os.read(self._keyboard, 4096)
        except OSError:
            data = b""
        if not data:  # its other side is gone
            self.ended_by = self.ended_by or signal.SIGHUP
        for key in keys_of(data):
            if key.lower() == b"q":
                self.is_quit = True
            else:
                self.browsing.press(key)

    # Signals only note what is to be done: what they interrupt may be halfway through an escape sequence.

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        self.ended_by = self.ended_by or number

    def _on_change(self, number: int, frame: FrameType | None) -> None:
        """Nothing to do: the signal itself ends the wait, and all is drawn anew."""

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._is_suspended = True

    def _suspend(self) -> None:
        """Stop as Ctrl-Z asks for, with the terminal as it was; take it again when this goes on."""
        self._is_suspended = False
        self._screen.close()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._take_screen()

    def _take_screen(self) -> None:
        from rich.live import Live

        # In their turn: the screen is left first.
        if self.has_keys:
            before = termios.tcgetattr(self._keyboard)
            self._screen.callback(_set_attributes, self._keyboard, before)
            tty.setcbreak(self._keyboard, termios.TCSANOW)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._screen.callback(_leave, self._live)
        self._live.start()


def _set_attributes(keyboard: int, attributes: list[Any]) -> None:
    with suppress(termios.error):
        termios.tcsetattr(keyboard, termios.TCSANOW, attributes)


def _leave(live: Live) -> None:
    try:
        live.stop()
        sys.stdout.flush()
    except OSError:  # nobody is there any more who would see it; Python writes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_terminal(stream: Any) -> bool:
    try:
        return stream is not None and bool(stream.isatty())
    except ValueError:  # closed
        return False
