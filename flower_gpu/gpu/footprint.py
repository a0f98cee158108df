"""Learned footprints: how much memory a task took on a GPU, kept for its next calls and runs.

One file for each user and host. Many processes read it and learn at the same time: a writer holds a lock and
replaces the file as a whole, so that a reader finds the old one or the new one, without a lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flower_gpu import config
from flower_gpu.errors import ConfigError
from flower_gpu.gpu import descriptors
from flower_gpu.gpu.footprint_key import Key

FILE_NAME: Final = "footprints.json"
VERSION: Final = 1

#: A footprint is the highest of so many last measurements: growth is known at once, a task that shrank after
#: so many calls.
REMEMBERED: Final = 32
#: What is asked for beyond a footprint: a tenth of it, and at least 64 MiB. Calls of the same task differ a
#: little, and the allocator takes memory in blocks of 2 to 20 MiB
#: (PyTorch's CUDACachingAllocator: kSmallBuffer, kLargeBuffer).
MARGIN: Final = 0.10
LEAST_MARGIN_BYTES: Final = 64 << 20
#: Size of a CUDA context where none was measured: more than the 0.3 to 0.5 GiB seen with current drivers.
DEFAULT_CONTEXT_BYTES: Final = 512 << 20

_MOST_ENTRIES = 500  # the oldest are forgotten
_LOCK_WAIT_S = 10.0  # it is held for a few ms; one that was stopped may hold it for ever
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02

# What a file of ours does not exceed: 1 EiB, the year 5138.
_MOST_BYTES, _LATEST_S = 1 << 60, 1e11


@dataclass(frozen=True)
class Peaks:
    """What was measured of one thing.

    Parameters
    ----------
    recent_bytes : tuple of int
        The last measurements, oldest first, at most :data:`REMEMBERED`.
    measured : int
        How many there were in all.
    updated_s : float
        When the last one was taken, Unix time.
    """

    recent_bytes: tuple[int, ...]
    measured: int
    updated_s: float

    @property
    def peak_bytes(self) -> int:
        """The highest of the recent ones."""
        return max(self.recent_bytes)

    def and_now(self, number_bytes: int) -> Peaks:
        """Return it with one more measurement."""
        return Peaks((*self.recent_bytes, number_bytes)[-REMEMBERED:], self.measured + 1, time.time())


@dataclass(frozen=True)
class _Known:
    """All that is in the file."""

    peaks: Mapping[Key, Peaks] = field(default_factory=dict)
    contexts: Mapping[str, Peaks] = field(default_factory=dict)


class Footprints:
    """The footprints of this user's tasks on this host.

    Parameters
    ----------
    path : Path, optional
        The file; default: ``footprints.json`` in :func:`flower_gpu.config.state_dir`. It is made when
        something is learned, readable by its owner only.

    Notes
    -----
    A file that is not ours, or torn by a crash, is renamed with a warning, and a new one is begun: nothing is
    lost that cannot be measured again. A file that cannot be written is a warning, too.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or config.state_dir() / FILE_NAME
        self._read: tuple[object, _Known] = (None, _Known())

    def get(self, key: Key) -> int | None:
        """Return the highest recent peak in bytes, context included; None where there is none yet."""
        found = self._load().peaks.get(key)
        return found.peak_bytes if found else None

    def learn(self, key: Key, peak_bytes: int) -> None:
        """Keep what a call has taken at most, its context included.

        Raises
        ------
        ConfigError
            If it is no number of bytes from 1 on, or the folder is not this user's alone.
        """
        _check_bytes(peak_bytes)

        def change(known: _Known) -> _Known:
            peaks = dict(known.peaks)
            peaks[key] = peaks.get(key, _NEW).and_now(peak_bytes)
            kept = sorted(peaks, key=lambda one: peaks[one].updated_s)[-_MOST_ENTRIES:]
            return _Known({one: peaks[one] for one in kept}, known.contexts)

        self._change(change)

    def context(self, gpu: str) -> int:
        """Return how large a CUDA context is on this model of GPU, in bytes."""
        found = self._load().contexts.get(gpu)
        return found.peak_bytes if found else DEFAULT_CONTEXT_BYTES

    def learn_context(self, gpu: str, context_bytes: int) -> None:
        """Keep how large a CUDA context was on this model of GPU; errors as for :meth:`learn`."""
        _check_bytes(context_bytes)

        def change(known: _Known) -> _Known:
            measured = known.contexts.get(gpu, _NEW).and_now(context_bytes)
            return _Known(known.peaks, {**known.contexts, gpu: measured})

        self._change(change)

    @staticmethod
    def needed_bytes(peak_bytes: int) -> int:
        """Return what to ask for where the peak was ``peak_bytes``: with a margin."""
        return peak_bytes + max(int(peak_bytes * MARGIN), LEAST_MARGIN_BYTES)

    def entries(self) -> dict[Key, Peaks]:
        """Return all footprints, those measured last at the end."""
        known = self._load().peaks
        return dict(sorted(known.items(), key=lambda item: item[1].updated_s))

    def contexts(self) -> dict[str, Peaks]:
        """Return what contexts were measured, by model of GPU."""
        return dict(sorted(self._load().contexts.items()))

    def clear(self, task: str | None = None) -> int:
        """Forget the footprints of a task, or all of them and the contexts. Return how many footprints."""
        removed = 0

        def change(known: _Known) -> _Known:
            nonlocal removed
            kept = {key: one for key, one in known.peaks.items() if task is not None and key.task != task}
            removed = len(known.peaks) - len(kept)
            return _Known(kept, {} if task is None else known.contexts)

        if self.path.exists() and not self._change(change):
            raise ConfigError(f"{self.path} could not be changed; the warning says why")
        return removed

    def version(self) -> tuple[int, ...] | None:
        """Return something that changes when the file does; None where there is none. One system call."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        # Replaced files differ in their inode, until the number is used again: then in the time, most likely.
        return (found.st_ino, found.st_mtime_ns, found.st_size)

    def _load(self) -> _Known:
        version = self.version()
        if version is None:
            return _Known()
        if self._read[0] != version:
            self._check_folder()
            try:
                self._read = (version, _parse(self.path.read_bytes()))
            except FileNotFoundError:  # just cleared or put aside
                return _Known()
            except (OSError, ValueError):
                self._change(lambda known: known)  # under the lock: another process may be doing the same
                return self._read[1]
        return self._read[1]

    def _change(self, change: Callable[[_Known], _Known]) -> bool:
        """Replace the file by what ``change`` makes of its content. False, after a warning, if that fails."""
        try:
            self._check_folder()
            with _locked(self.path.with_name(f"{self.path.name}.lock")):
                before = self._read_or_put_aside()
                known = change(before)
                if known != before:
                    _replace(self.path, _format(known))
                self._read = (self.version(), known)
        except OSError as error:
            warnings.warn(f"footprints cannot be kept in {self.path}: {error}", RuntimeWarning, stacklevel=3)
            return False
        return True

    def _read_or_put_aside(self) -> _Known:
        try:
            return _parse(self.path.read_bytes())
        except FileNotFoundError:
            return _Known()
        except (OSError, ValueError) as error:
            aside = self.path.with_name(f"{self.path.name}.unreadable")
            self.path.replace(aside)
            warnings.warn(
                f"{self.path} could not be read ({error}); it is {aside.name} now, and all is learned anew",
                RuntimeWarning,
                stacklevel=5,
            )
            return _Known()

    def _check_folder(self) -> None:
        folder = self.path.parent
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise ConfigError(
                f"{folder} must be a folder of this user that nobody else can write to; remove it, or set "
                "FLOWER_GPU_STATE_DIR to another folder"
            )


_NEW = Peaks((), 0, 0.0)


def _check_bytes(number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
        raise ConfigError(f"a measured size must be a number of bytes from 1 on, not {number!r}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file; TimeoutError, an OSError, if somebody else does not give it back."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = descriptors.opened(path, flags)
    try:
        deadline, pause_s = time.monotonic() + _LOCK_WAIT_S, _FIRST_PAUSE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has locked {path.name} for {_LOCK_WAIT_S:g} s"
                    ) from None
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        try:
            yield
        finally:
            # Said, not left to close: a fork in another thread may have a copy for a moment.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        descriptors.close(descriptor)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.new")  # one name will do: the lock is held
    with suppress(FileNotFoundError):
        temporary.unlink()  # left by a process that was killed
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)


def _format(known: _Known) -> bytes:
    peaks = [{**vars(key), **vars(one)} for key, one in known.peaks.items()]
    contexts = [{"gpu": gpu, **vars(one)} for gpu, one in known.contexts.items()]
    return json.dumps({"v": VERSION, "peaks": peaks, "contexts": contexts}).encode()


def _parse(data: bytes) -> _Known:
    """Read a file; ValueError if it is not one of ours."""
    try:
        content = json.loads(data)
        if content["v"] != VERSION:
            raise ValueError(f"version {content['v']!r} instead of {VERSION}")
        return _Known(
            {_parse_key(one): _parse_peaks(one) for one in content["peaks"]},
            {_a(str, one["gpu"]): _parse_peaks(one) for one in content["contexts"]},
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a file of footprints, {type(error).__name__}: {error}") from None


def _parse_key(one: dict[str, Any]) -> Key:
    sizes = tuple((_a(str, name), _a((int, str), value)) for name, value in one["sizes"])
    return Key(_a(str, one["task"]), _a(str, one["weights"]), _a(str, one["gpu"]), sizes)


def _parse_peaks(one: dict[str, Any]) -> Peaks:
    recent = tuple(_a(int, number) for number in one["recent_bytes"])
    updated_s = float(one["updated_s"])
    if not (recent and 0 < min(recent) <= max(recent) <= _MOST_BYTES and 0 <= updated_s <= _LATEST_S):
        raise ValueError("a size or a time that cannot be")
    return Peaks(recent[-REMEMBERED:], _a(int, one["measured"]), updated_s)


def _a(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind}")
    return value
