"""`--max-concurrent`: never more messages at a time than there are slots, and first come, first served."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flower_gpu.flower import node_slots as slots

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/locks"),
]

_LIMIT_S = 30.0


class Messages:
    """Processes that want one of so many slots."""

    def __init__(self, count: int) -> None:
        self.folder = slots.make(count)
        self._queue = (self.folder / "queue").stat().st_ino
        self.holds: list[int] = []
        self._host = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("clientapp_slots_host.py")],
            env={**os.environ, slots.VARIABLE: str(self.folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._host.stdout is not None
        os.set_blocking(self._host.stdout.fileno(), False)
        self._text = b""
        self._started: list[int] = []
        self._alive: set[int] = set()

    def arrive(self) -> int:
        """Start one; it is in line, or has a slot, when this returns."""
        self._tell("start", 0)
        known = len(self._started)
        self.wait(lambda: len(self._started) > known)
        pid = self._started[-1]
        self._alive.add(pid)
        self.wait(lambda: pid in self.holds or pid in self._in_line())
        return pid

    def release(self, pid: int) -> None:
        """Have a holder let go of its slot."""
        self._tell("release", pid)
        self.wait(lambda: pid not in self.holds)
        self._alive.remove(pid)

    def kill(self, pid: int) -> None:
        """End one with SIGKILL."""
        self._tell("kill", pid)
        self.wait(lambda: not Path(f"/proc/{pid}").exists())
        if pid in self.holds:
            self.holds.remove(pid)
        self._alive.remove(pid)
        # Who stood behind it is woken and stands in line again; until then a new one could come before.
        self.wait(lambda: self._alive <= self._in_line() | set(self.holds))

    def wait(self, condition: Any) -> None:
        """Take in what they say until something is so."""
        deadline = time.monotonic() + _LIMIT_S
        while True:
            self._read()
            if condition():
                return
            assert time.monotonic() < deadline, (self.holds, Path("/proc/locks").read_text())
            time.sleep(0.002)

    def holders(self) -> set[int]:
        """Return who locks a slot, by the kernel's own list."""
        inodes = {path.stat().st_ino for path in self.folder.iterdir()} - {self._queue}
        return {pid for pid, inode, waits in _locks() if inode in inodes and not waits}

    def close(self) -> None:
        """End all of them."""
        for pid in self._started:
            self._tell("kill", pid)
        assert self._host.stdin is not None and self._host.stdout is not None
        self._host.stdin.close()
        self._host.wait(_LIMIT_S)
        self._host.stdout.close()

    def _in_line(self) -> set[int]:
        return {pid for pid, inode, _ in _locks() if inode == self._queue}

    def _tell(self, what: str, pid: int) -> None:
        assert self._host.stdin is not None
        self._host.stdin.write(json.dumps([what, pid]).encode() + b"\n")
        self._host.stdin.flush()

    def _read(self) -> None:
        assert self._host.stdout is not None
        *lines, self._text = (self._text + (self._host.stdout.read() or b"")).split(b"\n")
        for line in map(json.loads, lines):
            if "started" in line:
                self._started.append(line["started"])
            elif "holds" in line:
                self.holds.append(line["holds"])
            elif line["done"] in self.holds:
                self.holds.remove(line["done"])


def _locks() -> Iterator[tuple[int, int, bool]]:
    """Yield process, inode and whether it only waits, of each lock on the host."""
    for line in Path("/proc/locks").read_text().splitlines():
        parts = line.split()
        waits = parts[1] == "->"
        _, _, _, pid, file = parts[1 + waits : 6 + waits]
        yield int(pid), int(file.rpartition(":")[2]), waits


@contextmanager
def messages(count: int) -> Iterator[Messages]:
    found = Messages(count)
    try:
        yield found
    finally:
        found.close()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50)), min_size=4, max_size=14))
def test_never_more_than_there_are_slots_and_first_come_first_served(
    count: int, steps: list[tuple[int, int]]
) -> None:
    with messages(count) as host:
        alive: list[int] = []  # in the order of their coming: the first ones have the slots
        for step, which in steps:
            holders = alive[:count]
            if step <= 2 or not alive:
                alive.append(host.arrive())
            elif step == 3:
                pid = alive[which % len(alive)]  # one that waits, or a holder
                host.kill(pid)
                alive.remove(pid)
            else:
                pid = holders[which % len(holders)]
                host.release(pid)
                alive.remove(pid)
            expected = alive[:count]
            host.wait(lambda: len(host.holds) >= len(expected))  # noqa: B023 - called at once
            assert sorted(host.holds) == sorted(expected)
            assert host.holders() == set(expected)


def test_an_error_in_a_message_gives_the_slot_back() -> None:
    environ = {slots.VARIABLE: str(slots.make(1))}
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), slots.held(environ):
            raise ZeroDivisionError
    with slots.held(environ):
        pass


@pytest.mark.parametrize("environ", [{}, {slots.VARIABLE: ""}])
def test_without_slots_nobody_waits(environ: dict[str, str]) -> None:
    with slots.held(environ), slots.held(environ):
        pass


def test_slots_of_processes_that_are_gone_are_removed_and_others_kept() -> None:
    make = "from flower_gpu.flower import node_slots as slots; print(slots.make(2), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", make], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        odd = theirs.parent / "no process has this name"
        odd.mkdir()
        # As from another container, where processes have other numbers.
        elsewhere, left = (theirs.parent / f"{2**30}-{number}" for number in range(2))
        elsewhere.mkdir()
        left.mkdir()
        holding = os.open(elsewhere, os.O_RDONLY)
        fcntl.flock(holding, fcntl.LOCK_SH)
        ours = slots.make(3)
        assert theirs.exists() and odd.exists() and elsewhere.exists() and not left.exists()
        os.close(holding)
        assert sorted(path.name for path in ours.iterdir()) == ["0", "1", "2", "queue"]
        assert (ours.stat().st_mode & 0o777, (ours / "queue").stat().st_mode & 0o777) == (0o700, 0o600)
        other.communicate("\n", timeout=_LIMIT_S)
    more = slots.make(1)
    assert ours.exists() and more.exists() and not theirs.exists() and not elsewhere.exists()


def test_files_in_use_do_not_look_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path / "state"))
    folder = slots.make(2)
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    slots.keep({})
    slots.keep({slots.VARIABLE: str(tmp_path / "gone")})
    assert {path.stat().st_mtime for path in folder.iterdir()} == {1}
    slots.keep({slots.VARIABLE: str(folder)})
    assert all(path.stat().st_mtime > 1e9 for path in folder.iterdir())
