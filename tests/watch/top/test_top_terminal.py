"""`flower-gpu top` on a terminal: it draws, obeys keys and signals, and restores the terminal at the end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from command_shell import Shell
from many_files import WITH_MANY_FILES
from nvml_stub import GIB, Host

from flower_gpu.polling import readable
from flower_gpu.trace import VERSION

ALT_SCREEN, MAIN_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
# The waits should take an instant, but the machine may be busy.
WAIT_S = 60
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal of the given size, and `flower-gpu top` as its only process."""

    def __init__(
        self,
        env: dict[str, str],
        *arguments: str,
        width: int = 80,
        height: int = 24,
        command_prefix: Sequence[str] = (),
    ) -> None:
        self.master, self._slave = pty.openpty()
        self.output = b""
        self.resize(width, height)
        self.saved_attributes = self.attributes()
        self.process = subprocess.Popen(
            [*command_prefix, sys.executable, "-m", "flower_gpu.cli", "top", *arguments],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**env, "TERM": "xterm-256color"},
            start_new_session=True,
            # The kernel sends Ctrl-C and changes of the size only to processes with this controlling
            # terminal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def attributes(self) -> list[Any]:
        return termios.tcgetattr(self._slave)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def read_until(self, text: bytes, since: int = 0) -> None:
        """Wait until the command has written this text."""
        self.read_until_match(re.escape(text), since)

    def read_until_match(self, pattern: bytes, since: int = 0, *, raw: bool = False) -> None:
        """Wait until the output matches a pattern. With ``raw``, the output includes escape sequences."""
        deadline = time.monotonic() + WAIT_S
        while not re.search(
            pattern, self.output if raw else _ESCAPES.sub(b"", self.output[since:]), re.DOTALL
        ):
            assert readable([self.master], max(0, deadline - time.monotonic())), self.output
            self.output += os.read(self.master, 65536)

    def end(self) -> int:
        """Wait for the end of the command, and return its exit status."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None or readable([self.master], 0):
            assert time.monotonic() < deadline
            if readable([self.master], 0.05):
                self.output += os.read(self.master, 65536)
        return self.process.returncode

    def is_restored(self) -> bool:
        """Return True if modes, screen and cursor of the terminal are restored."""
        return (
            self.attributes() == self.saved_attributes
            and self.output.rindex(MAIN_SCREEN) > self.output.rindex(ALT_SCREEN)
            and self.output.rindex(SHOW_CURSOR) > self.output.rindex(HIDE_CURSOR)
        )

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for descriptor in (self.master, self._slave):
            with suppress(OSError):
                os.close(descriptor)


@pytest.fixture
def terminal(shell: Shell) -> Iterator[Terminal]:
    """A terminal with `flower-gpu top` on a host without GPUs, after its first frame."""
    with closing(Terminal(shell.env)) as started:
        started.read_until(b"Waiting  nobody")
        # The terminal is in a mode in which keys are read one by one.
        assert started.attributes() != started.saved_attributes
        yield started


def test_q_quits_and_ctrl_z_restores_the_terminal_while_stopped(terminal: Terminal) -> None:
    """The view goes on at once, because the kernel stops no process of an orphaned process group."""
    terminal.press(b"xyz\r\x1bOq\x1bq\x1b[A\x1a")
    terminal.read_until_match(re.escape(MAIN_SCREEN), raw=True)
    # The first frame may have been drawn before the key was read, so a second one is needed.
    for _ in range(2):
        terminal.read_until(b"Waiting  nobody", len(terminal.output))
    terminal.press(b"q")
    assert terminal.end() == 0
    assert terminal.is_restored()
    assert b"Traceback" not in terminal.output


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_signals_end_the_view(terminal: Terminal, how: str) -> None:
    if how == "Ctrl-C":
        terminal.press(b"\x03")
    else:
        terminal.process.terminate()
    assert terminal.end() == 128 + (signal.SIGINT if how == "Ctrl-C" else signal.SIGTERM)
    assert terminal.is_restored()
    assert b"Traceback" not in terminal.output


def test_a_lost_connection_ends_the_view(terminal: Terminal) -> None:
    os.close(terminal.master)
    assert terminal.process.wait(WAIT_S) == 128 + signal.SIGHUP


def test_any_number_of_open_files(shell: Shell) -> None:
    with closing(Terminal(shell.env, command_prefix=WITH_MANY_FILES)) as terminal:
        terminal.read_until(b"Waiting  nobody")
        terminal.press(b"q")
        assert terminal.end() == 0, terminal.output


def test_a_terminal_without_a_size_uses_the_exported_size(shell: Shell) -> None:
    env = {**shell.env, "COLUMNS": "150", "LINES": "50"}
    with closing(Terminal(env, width=0, height=0)) as terminal:
        terminal.read_until(b"It comes with the driver; in a container")


def test_changes_on_the_host_are_shown(shell: Shell, tmp_path: Path) -> None:
    host = Host(tmp_path / "host", gpus=1)
    shell.on(host)
    with closing(Terminal(shell.env, "--interval", "0.1")) as terminal:
        terminal.read_until(b"leased 0.0 of 15.8")
        holder = shell.holder("fit of client 7", 6 * GIB)
        terminal.read_until(b"leased 6.0 of 15.8")
        terminal.read_until(b"fit of client 7")
        shell.waiter("fit of client 8", 12 * GIB)
        terminal.read_until(b"1. 12.0 GiB on GPU 0 fit of client 8")
        host.set(0, lost=True)
        terminal.read_until(b"it is lost")
        host.set(0, lost=False)
        holder.kill()
        terminal.read_until(b"leased 12.0 of 15.8", len(terminal.output))


def test_keys_sort_and_scroll_and_the_view_follows_the_terminal_size(shell: Shell, tmp_path: Path) -> None:
    with (tmp_path / "trace.jsonl").open("w") as file:
        worker = {"event": "worker_started", "task": "fit", "round": 1}
        for event in (
            {"event": "run_started", "kind": "simulate", "name": "many", "host": "elsewhere"},
            *({**worker, "call": str(n), "client": str(n), "pid": n} for n in range(1000)),
        ):
            file.write(json.dumps({"v": VERSION, "time": time.time(), **event}) + "\n")
    # Variables that a shell has exported hold an old size and must not count.
    env = {**shell.env, "COLUMNS": "80", "LINES": "24"}
    with closing(Terminal(env, str(tmp_path), "--interval", "0.2")) as terminal:
        terminal.read_until(b"< > sort")
        for keys, mark in ((b">>", "client▲"), (b"r", "client▼")):
            since = len(terminal.output)
            terminal.press(keys)
            terminal.read_until_match(mark.encode(), since)
        # A smaller terminal keeps the first row, and a larger terminal is filled.
        terminal.press(b"\x1b[F")
        terminal.read_until_match(rb"-1000 of 1000", len(terminal.output))
        for width, height, shown in ((40, 10, rb"Workers  9\d\d-9\d\d of"), (80, 50, rb"-1000 of 1000")):
            since = len(terminal.output)
            terminal.resize(width, height)
            terminal.read_until_match(shown, since)
        terminal.press(b"q")
        assert terminal.end() == 0
        assert terminal.is_restored()
