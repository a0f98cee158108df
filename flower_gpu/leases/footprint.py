"""The file of learned footprints: the memory of earlier calls, kept for later calls and runs.

There is one file for each user and host. Many processes read it and learn at the same time. A writer holds a
lock and replaces the whole file, so a reader needs no lock and sees either the old file or the new one.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.leases import footprint_rule
from flower_gpu.leases.footprint_rule import LEAST_SPARE, MOST_SPARE, Key, Measured, is_context
from flower_gpu.workers import state_folder

FILE_NAME: Final = "footprints.json"
VERSION: Final = 2

#: Number of remembered measurements. A footprint is the highest of them, so growth is known at once, and a
#: task that shrank after this many calls.
REMEMBERED: Final = 32
#: Assumed size of a CUDA context before one was measured: more than the 0.3 to 0.5 GiB seen with current
#: drivers.
DEFAULT_CONTEXT_BYTES: Final = 512 << 20
# Largest number of entries in the file. The oldest are removed first.
_MAX_ENTRIES = 500

# Limits of valid numbers in the file: 1 EiB, the year 5138
_MAX_BYTES, _LATEST_S = 1 << 60, 1e11


# Task name of the entries for CUDA contexts, one for each model of GPU
_CONTEXT: Final = "CUDA context"


@dataclass(frozen=True)
class Peaks:
    """Measurements of one task's calls, or of CUDA contexts on one model of GPU."""

    recent_bytes: tuple[int, ...]  # the last :data:`REMEMBERED` measurements, oldest first
    measured: int  # number of all measurements
    updated_s: float  # Unix time of the last measurement
    # Bytes of the allocator for each byte of tensors, see :func:`footprint_rule.spare_after`
    spare: float = LEAST_SPARE
    # Memory of the last call outside of its allocator: the context and other libraries
    outside_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The highest recent measurement."""
        return max(self.recent_bytes)

    @property
    def context_bytes(self) -> int:
        """The smallest recent measurement of a context, because larger ones may include other memory."""
        return min(self.recent_bytes, default=DEFAULT_CONTEXT_BYTES)

    def with_measurement(self, number_bytes: int, **fields: Any) -> Peaks:
        """Return a copy with one more measurement, and with ``fields`` replaced."""
        recent = (*self.recent_bytes, number_bytes)[-REMEMBERED:]
        return replace(self, recent_bytes=recent, measured=self.measured + 1, updated_s=time.time(), **fields)

    def after(self, call: Measured) -> Peaks:
        """Return a copy with the measurement of one more call."""
        return self.with_measurement(
            footprint_rule.footprint_bytes(call, self.spare),
            spare=footprint_rule.spare_after(call, self.spare),
            outside_bytes=call.outside_bytes,
        )

    def after_out_of_memory(self, needed_bytes: int, in_allocator: tuple[int, int] | None) -> Peaks:
        """Return a copy with the need of a call that ran out of memory; see :meth:`Footprints.learn_need`."""
        spare = footprint_rule.more_spare(self.spare, *(in_allocator or (0, 0)))
        return self.with_measurement(needed_bytes, spare=spare)


# The content of the file
_PeaksByKey = Mapping[Key, Peaks]


class Footprints:
    """The footprints of this user's tasks on this host.

    ``path``: the file, by default in the state folder. It is created with the first measurement and can be
    read by its owner only. A file that is damaged or not ours is renamed with a warning, and a new one is
    started. A file that cannot be written causes a warning as well.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or state_folder.state_dir() / FILE_NAME
        # Version and content of the file when it was last read
        self._cached: tuple[object, _PeaksByKey] = (None, {})

    def get(self, key: Key) -> int | None:
        """Return the highest recent footprint in bytes, including the context, or None."""
        peaks = self._load().get(key)
        return peaks.peak_bytes if peaks else None

    def learn(self, key: Key, peak_bytes: int) -> None:
        """Record the peak of a call, including the context.

        Raises ConfigError if the peak is not a positive number of bytes, or if other users can write to the
        folder.
        """
        self._learn(key, lambda peaks: peaks.with_measurement(peak_bytes), peak_bytes)

    def learn_call(self, key: Key, call: Measured, *, is_done: bool = True) -> None:
        """Record the footprint of a call. Raises the same errors as :meth:`learn`.

        ``is_done``: False if the task failed before its end. Its footprint is recorded only if it is higher
        than all recent ones.
        """
        peaks = self._load().get(key, _NEW)
        footprint = footprint_rule.footprint_bytes(call, peaks.spare)
        if not is_done and footprint <= max(peaks.recent_bytes, default=footprint):
            return
        self._learn(key, lambda peaks: peaks.after(call), footprint)

    def learn_need(self, key: Key, needed_bytes: int, in_allocator: tuple[int, int] | None) -> None:
        """Record the need of a call that ran out of memory. Raises the same errors as :meth:`learn`.

        ``needed_bytes``: memory that the call needed to go on, including the context.
        ``in_allocator``: the part of it in the allocator, and the part of that in tensors. None for
        frameworks without such figures.
        """
        self._learn(key, lambda peaks: peaks.after_out_of_memory(needed_bytes, in_allocator), needed_bytes)

    def _learn(self, key: Key, update: Callable[[Peaks], Peaks], number_bytes: int) -> None:
        _check_bytes(number_bytes)

        def updated(previous: _PeaksByKey) -> _PeaksByKey:
            peaks = {**previous, key: update(previous.get(key, _NEW))}
            newest = sorted(peaks, key=lambda other: peaks[other].updated_s)[-_MAX_ENTRIES:]
            return {key: peaks[key] for key in newest}

        self._update(updated)

    def outside(self, key: Key) -> int:
        """Return the bytes outside of the allocator in the last call of a task, or 0 if unknown."""
        return self._load().get(key, _NEW).outside_bytes

    def context(self, gpu: str) -> int:
        """Return the size of a CUDA context on this model of GPU in bytes."""
        return self._load().get(_context_on(gpu), _NEW).context_bytes

    def learn_context(self, gpu: str, context_bytes: int) -> None:
        """Record the size of a CUDA context on this model of GPU. Raises the same errors as :meth:`learn`.

        Implausible sizes are ignored, see :data:`footprint_rule.MOST_CONTEXT_BYTES`.
        """
        _check_bytes(context_bytes)
        if is_context(context_bytes):
            self.learn(_context_on(gpu), context_bytes)

    def entries(self) -> dict[Key, Peaks]:
        """Return the footprints of all tasks. The last measured one is at the end."""
        items = sorted(self._load().items(), key=lambda item: item[1].updated_s)
        return {key: peaks for key, peaks in items if key.task != _CONTEXT}

    def contexts(self) -> dict[str, Peaks]:
        """Return the measured sizes of contexts by model of GPU."""
        items = sorted(self._load().items(), key=str)
        return {key.gpu: peaks for key, peaks in items if key.task == _CONTEXT}

    def clear(self, task: str | None = None) -> int:
        """Remove the footprints of a task, or all footprints and contexts. Return the number removed."""
        removed = 0

        def updated(previous: _PeaksByKey) -> _PeaksByKey:
            nonlocal removed
            kept = {key: peaks for key, peaks in previous.items() if task is not None and key.task != task}
            removed = sum(key.task != _CONTEXT for key in previous.keys() - kept.keys())
            return kept

        if self.path.exists() and not self._update(updated):
            raise ConfigError(f"{self.path} could not be changed; the warning says why")
        return removed

    def version(self) -> tuple[int, ...] | None:
        """Return a value that changes with the file, or None without a file. Takes one system call."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        # A replaced file has another inode. When the kernel reuses the number, the time differs.
        return (status.st_ino, status.st_mtime_ns, status.st_size)

    def _load(self) -> _PeaksByKey:
        version = self.version()
        if version is None:
            return {}
        if self._cached[0] != version:
            self._check_folder()
            try:
                self._cached = (version, _parse(self.path.read_bytes()))
            except FileNotFoundError:  # cleared or renamed by another process
                return {}
            except (OSError, ValueError):
                # Renames the file with the lock held, because another process may be doing the same.
                self._update(lambda previous: previous)
                return self._cached[1]
        return self._cached[1]

    def _update(self, updated: Callable[[_PeaksByKey], _PeaksByKey]) -> bool:
        """Replace the content of the file by ``updated(content)``. Return False on failure, and warn."""
        try:
            self._check_folder()
            with files.locked(self.path.with_name(f"{self.path.name}.lock")):
                previous = self._read_or_put_aside()
                peaks = updated(previous)
                if peaks != previous:
                    # The lock is held, so one temporary name is enough.
                    with files.replaced(self.path, mode=0o600, has_one_writer=True) as new:
                        new.write_bytes(_format(peaks))
                self._cached = (self.version(), peaks)
        except OSError as error:
            warnings.warn(f"footprints cannot be kept in {self.path}: {error}", RuntimeWarning, stacklevel=3)
            return False
        return True

    def _read_or_put_aside(self) -> _PeaksByKey:
        try:
            return _parse(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            aside = self.path.with_name(f"{self.path.name}.unreadable")
            self.path.replace(aside)
            warnings.warn(
                f"{self.path} could not be read ({error}); it was renamed to {aside.name}, and footprints "
                "are learned again",
                RuntimeWarning,
                stacklevel=5,
            )
            return {}

    def _check_folder(self) -> None:
        folder = self.path.parent
        if folder == state_folder.state_dir():
            state_folder.made_state_dir()
            return
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        if not files.is_own_folder(folder):
            raise ConfigError(
                f"{folder} must be a folder that only this user can write to; remove it, or set "
                "FLOWER_GPU_STATE_DIR to another folder"
            )


_NEW: Final = Peaks((), 0, 0.0)


def _context_on(gpu: str) -> Key:
    return Key(_CONTEXT, "", gpu)


def _check_bytes(number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
        raise ConfigError(f"a measured size must be a positive number of bytes, not {number!r}")


def _format(peaks_by_key: _PeaksByKey) -> bytes:
    entries = [{**vars(key), **vars(peaks)} for key, peaks in peaks_by_key.items()]
    return json.dumps({"v": VERSION, "peaks": entries}).encode()


def _parse(data: bytes) -> _PeaksByKey:
    """Parse the content of a file. Raises ValueError if it is not a file of footprints."""
    try:
        content = json.loads(data)
        if content["v"] != VERSION:
            raise ValueError(f"version {content['v']!r} instead of {VERSION}")
        return {_parse_key(entry): _parse_peaks(entry) for entry in content["peaks"]}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a file of footprints, {type(error).__name__}: {error}") from None


def _parse_key(entry: dict[str, Any]) -> Key:
    sizes = tuple((_typed(str, name), _typed((int, str), value)) for name, value in entry["sizes"])
    return Key(_typed(str, entry["task"]), _typed(str, entry["weights"]), _typed(str, entry["gpu"]), sizes)


def _parse_peaks(entry: dict[str, Any]) -> Peaks:
    recent = tuple(_typed(int, number) for number in entry["recent_bytes"])
    spare, updated_s = float(entry["spare"]), float(entry["updated_s"])
    outside_bytes = _typed(int, entry["outside_bytes"])
    if not (recent and 0 < min(recent) <= max(recent) <= _MAX_BYTES and 0 <= outside_bytes <= _MAX_BYTES):
        raise ValueError("an impossible size")
    if not (LEAST_SPARE <= spare <= MOST_SPARE and 0 <= updated_s <= _LATEST_S):
        raise ValueError("an impossible spare or time")
    return Peaks(recent[-REMEMBERED:], _typed(int, entry["measured"]), updated_s, spare, outside_bytes)


def _typed(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not {kind}")
    return value
