"""The rules of the GPU guard, made once where workers are forked from, for all of them.

To make them takes a worker most of what the guard takes: a rule for each entry of ``/`` and of ``/dev``. A
process that forks workers keeps them (:func:`prepare`), and makes new ones when these folders or the mounts
have changed. Its fork restricts itself by them (:func:`taken`).
"""

from __future__ import annotations

import os
import select
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from flower_gpu import landlock
from flower_gpu.gpu import device_files
from flower_gpu.options import DEVICES_VARIABLE, GUARD_VARIABLE, GUARDED_VARIABLE, value_of

#: The value of the variable where nobody knows a GPU's files.
EVERYTHING: Final = "*"

_MOUNTS: Final = "/proc/self/mountinfo"  # proc(5): it tells by POLLPRI that it has changed
_MOST: Final = 32  # rulesets that are kept, one for each set of device files
# Changes within one tick of the kernel's clock have the same time.
_TICK_NS: Final = 50_000_000


@dataclass(frozen=True)
class Rules:
    """By which a worker can open the device files of its lease, and of no other GPU."""

    ruleset: landlock.Ruleset
    devices: frozenset[int]  # numbers of those that it cannot open
    folders: tuple[str, ...]  # where changes make new rules necessary

    def close_devices(self) -> None:
        """Close what this process has open of them, such as what a preload function has left."""
        for descriptor in list(map(int, os.listdir("/proc/self/fd"))):  # noqa: PTH208 - each worker does it
            with suppress(OSError):
                found = os.fstat(descriptor)
                if stat.S_ISCHR(found.st_mode) and found.st_rdev in self.devices:
                    os.close(descriptor)


_current: _Kept | None = None
_next: Rules | None = None  # of the worker that is about to be forked


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those that say what the rules of a worker with this environment are."""
    names = (DEVICES_VARIABLE, GUARD_VARIABLE, GUARDED_VARIABLE)
    return {name: environ[name] for name in names if name in environ}


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Tell whether a worker with this environment is to be kept from GPUs."""
    is_told = environ.get(DEVICES_VARIABLE, EVERYTHING) != EVERYTHING
    return is_told and value_of(GUARD_VARIABLE, environ) != "off"


def granted(environ: Mapping[str, str]) -> list[str]:
    """Return the device files that a worker with this environment may open; all where none are refused."""
    if not is_wanted(environ):
        return device_files.of_host(environ)
    files = [path for path in environ[DEVICES_VARIABLE].split(os.pathsep) if path]
    return [*files, *device_files.SHARED] if files else []


def made(environ: Mapping[str, str]) -> Rules | None:
    """Make the rules for such a worker; None where this host has nothing to be kept from.

    Raises UnavailableError if the kernel cannot do that.
    """
    refused = device_files.of_host(environ)
    if not refused:
        return None
    files = granted(environ)
    if files:
        _make_missing()
    devices = device_files.numbers(refused) - device_files.numbers(files)
    found = landlock.without(refused, files)
    places = [str(folder / "dri") for folder in device_files.device_folders()]
    folders = {*found.folders, *places, *map(os.path.dirname, files)}
    return Rules(found.rules, frozenset(devices), tuple(folders))


def prepare(environ: Mapping[str, str]) -> None:
    """Make the rules of a worker that this process is about to fork, or find those of an earlier one.

    Does nothing where that cannot be: then the worker makes them for itself, and says why not.
    """
    global _next
    _next = None
    if is_wanted(environ):
        with suppress(OSError, landlock.LandlockUnavailableError):
            _next = _kept().find(environ)


@contextmanager
def taken(environ: Mapping[str, str]) -> Iterator[Rules | None]:
    """Yield, in a worker, the rules that were prepared for it, or new ones; none where nothing is refused.

    Afterwards this process has none: who can reach them can add to them what all later workers could open.

    Raises UnavailableError if the kernel cannot do that.
    """
    rules = _next
    try:
        if rules is None and is_wanted(environ):
            rules = made(environ)
        yield rules
    finally:
        if rules is not None:
            rules.ruleset.close()
        leave()


def leave(*, but_next: bool = False) -> None:
    """Let go, in a fork, of the rules that its parent keeps; ``but_next``: not of those that are its own."""
    global _next, _current
    if not but_next:
        _next = None
    if _current is not None:
        _current.close(_next)
    _current = None


class _Kept:
    """What one process keeps."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._rules: dict[tuple[str, str], tuple[Rules, object]] = {}
        self._mounts = os.open(_MOUNTS, os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._mounts, select.POLLPRI)

    def find(self, environ: Mapping[str, str]) -> Rules | None:
        if self._poll.poll(0):
            self._let_go()
        key = environ[DEVICES_VARIABLE], environ.get(GUARDED_VARIABLE, "")
        if key in self._rules:
            rules, seen = self._rules[key]
            if seen is not None and seen == _look(rules.folders):
                return rules
            self._rules.pop(key)[0].ruleset.close()
        if len(self._rules) >= _MOST:
            self._let_go()
        before_ns = time.time_ns() - _TICK_NS
        new = made(environ)
        if new is not None:
            look = _look(new.folders)
            is_settled = all(entry is None or entry[2] < before_ns for entry in look)
            self._rules[key] = new, look if is_settled else None
        return new

    def _let_go(self, but: Rules | None = None) -> None:
        for rules, _ in self._rules.values():
            if rules is not but:
                rules.ruleset.close()
        self._rules.clear()

    def close(self, but: Rules | None) -> None:
        self._let_go(but)
        os.close(self._mounts)


def _kept() -> _Kept:
    global _current
    if _current is not None and _current.pid != os.getpid():
        leave()  # the parent's: it looks after its own, and both would hear of a change only once
    if _current is None:
        _current = _Kept()
    return _current


def _look(folders: tuple[str, ...]) -> list[tuple[int, int, int] | None]:
    """Return what is another value when a folder has other entries."""
    found: list[tuple[int, int, int] | None] = []
    for folder in folders:
        try:
            status = os.stat(folder)  # noqa: PTH116 - before each fork
        except OSError:
            found.append(None)
        else:
            found.append((status.st_dev, status.st_ino, status.st_mtime_ns))
    return found


def _make_missing() -> None:
    """Have NVIDIA's own helper make the file that CUDA makes when it starts: guarded, it could not."""
    if device_files.CONTROL.exists() and not device_files.MEMORY.exists():
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["nvidia-modprobe", "-u", "-c", "0"], timeout=30, check=False)
