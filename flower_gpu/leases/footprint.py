"""Learned footprints: how much memory a task took on a GPU, kept for its next calls and runs.

One file for each user and host. Many processes read it and learn at the same time: a writer holds a lock and
replaces the file as a whole, so that a reader finds the old one or the new one, without a lock.
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

#: A footprint is the highest of so many last measurements: growth is known at once, a task that shrank after
#: so many calls.
REMEMBERED: Final = 32
#: Size of a CUDA context where none was measured: more than the 0.3 to 0.5 GiB seen with current drivers.
DEFAULT_CONTEXT_BYTES: Final = 512 << 20
_MOST_ENTRIES = 500  # the oldest are forgotten

# What a file of ours does not exceed: 1 EiB, the year 5138.
_MOST_BYTES, _LATEST_S = 1 << 60, 1e11


# What stands for the task in the footprints of CUDA contexts, one for each model of GPU.
_CONTEXT: Final = "CUDA context"


@dataclass(frozen=True)
class Peaks:
    """What was measured of the calls of one task, or of CUDA contexts on one model of GPU."""

    recent_bytes: tuple[int, ...]  # the last measurements, oldest first, at most :data:`REMEMBERED`
    measured: int  # how many there were in all
    updated_s: float  # when the last one was taken, Unix time
    # What an allocator needs for a byte of tensors, see :func:`footprint_rule.spare_after`
    spare: float = LEAST_SPARE
    # What the last call had outside of its allocator: the context, and what other libraries took
    outside_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The highest of the recent ones."""
        return max(self.recent_bytes)

    @property
    def context_bytes(self) -> int:
        """The smallest of the recent ones, of contexts: others may have had something else counted in."""
        return min(self.recent_bytes, default=DEFAULT_CONTEXT_BYTES)

    def and_now(self, number_bytes: int, **fields: Any) -> Peaks:
        """Return it with one more measurement, and other fields changed."""
        recent = (*self.recent_bytes, number_bytes)[-REMEMBERED:]
        return replace(self, recent_bytes=recent, measured=self.measured + 1, updated_s=time.time(), **fields)

    def after(self, call: Measured) -> Peaks:
        """Return it with one more call."""
        return self.and_now(
            footprint_rule.footprint_bytes(call, self.spare),
            spare=footprint_rule.spare_after(call, self.spare),
            outside_bytes=call.outside_bytes,
        )

    def after_out_of_memory(self, needed_bytes: int, in_allocator: tuple[int, int] | None) -> Peaks:
        """Return it with one more call, which needed so much; see :meth:`Footprints.learn_need`."""
        spare = footprint_rule.more_spare(self.spare, *(in_allocator or (0, 0)))
        return self.and_now(needed_bytes, spare=spare)


_Known = Mapping[Key, Peaks]  # all that is in the file


class Footprints:
    """The footprints of this user's tasks on this host.

    ``path``: the file, in the state folder by default. It is made when something is learned, readable by its
    owner only. One that is not ours, or torn by a crash, is renamed with a warning, and a new one is begun:
    nothing is lost that cannot be measured again. A file that cannot be written is a warning, too.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or state_folder.state_dir() / FILE_NAME
        self._read: tuple[object, _Known] = (None, {})

    def get(self, key: Key) -> int | None:
        """Return the highest recent footprint in bytes, context included; None where there is none yet."""
        found = self._load().get(key)
        return found.peak_bytes if found else None

    def learn(self, key: Key, peak_bytes: int) -> None:
        """Keep the peak of a call, its context included.

        Raises ConfigError if it is no number of bytes from 1 on, or the folder is not this user's alone.
        """
        self._learn(key, lambda known: known.and_now(peak_bytes), peak_bytes)

    def learn_call(self, key: Key, call: Measured, *, is_done: bool = True) -> None:
        """Keep the footprint of a call; errors as for :meth:`learn`.

        ``key``: what it is of.
        ``call``: what it took.
        ``is_done``: whether the task has come to its end. One that failed before is kept only if it took more
        than is known.
        """
        known = self._load().get(key, _NEW)
        number = footprint_rule.footprint_bytes(call, known.spare)
        if not is_done and number <= max(known.recent_bytes, default=number):
            return
        self._learn(key, lambda known: known.after(call), number)

    def learn_need(self, key: Key, needed_bytes: int, in_allocator: tuple[int, int] | None) -> None:
        """Keep the need of a call that ran out of memory; errors as for :meth:`learn`.

        ``key``: what it is of.
        ``needed_bytes``: what it would have needed to go on, context included.
        ``in_allocator``: what of that the allocator would have had, and tensors in it; None where no
        allocator tells.
        """
        self._learn(key, lambda known: known.after_out_of_memory(needed_bytes, in_allocator), needed_bytes)

    def _learn(self, key: Key, change: Callable[[Peaks], Peaks], number_bytes: int) -> None:
        _check_bytes(number_bytes)

        def change_all(known: _Known) -> _Known:
            peaks = {**known, key: change(known.get(key, _NEW))}
            kept = sorted(peaks, key=lambda one: peaks[one].updated_s)[-_MOST_ENTRIES:]
            return {one: peaks[one] for one in kept}

        self._change(change_all)

    def outside(self, key: Key) -> int:
        """Return the bytes that the last call of a task had outside of its allocator; 0 if not known."""
        return self._load().get(key, _NEW).outside_bytes

    def context(self, gpu: str) -> int:
        """Return how large a CUDA context is on this model of GPU, in bytes."""
        return self._load().get(_context_on(gpu), _NEW).context_bytes

    def learn_context(self, gpu: str, context_bytes: int) -> None:
        """Keep how large a CUDA context was on this model of GPU; errors as for :meth:`learn`.

        What cannot be the size of a context is not kept, see :data:`footprint_rule.MOST_CONTEXT_BYTES`.
        """
        _check_bytes(context_bytes)
        if is_context(context_bytes):
            self.learn(_context_on(gpu), context_bytes)

    def entries(self) -> dict[Key, Peaks]:
        """Return the footprints of all tasks, those measured last at the end."""
        found = sorted(self._load().items(), key=lambda item: item[1].updated_s)
        return {key: one for key, one in found if key.task != _CONTEXT}

    def contexts(self) -> dict[str, Peaks]:
        """Return the measured sizes of contexts, by model of GPU."""
        return {key.gpu: one for key, one in sorted(self._load().items(), key=str) if key.task == _CONTEXT}

    def clear(self, task: str | None = None) -> int:
        """Forget the footprints of a task, or all of them and the contexts. Return how many footprints."""
        removed = 0

        def change(known: _Known) -> _Known:
            nonlocal removed
            kept = {key: one for key, one in known.items() if task is not None and key.task != task}
            removed = sum(key.task != _CONTEXT for key in known.keys() - kept.keys())
            return kept

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
            return {}
        if self._read[0] != version:
            self._check_folder()
            try:
                self._read = (version, _parse(self.path.read_bytes()))
            except FileNotFoundError:  # just cleared or put aside
                return {}
            except (OSError, ValueError):
                self._change(lambda known: known)  # under the lock: another process may be doing the same
                return self._read[1]
        return self._read[1]

    def _change(self, change: Callable[[_Known], _Known]) -> bool:
        """Replace the file by what ``change`` makes of its content. False, after a warning, if that fails."""
        try:
            self._check_folder()
            with files.locked(self.path.with_name(f"{self.path.name}.lock")):
                before = self._read_or_put_aside()
                known = change(before)
                if known != before:
                    # One name will do: the lock is held.
                    with files.replaced(self.path, mode=0o600, has_one_writer=True) as new:
                        new.write_bytes(_format(known))
                self._read = (self.version(), known)
        except OSError as error:
            warnings.warn(f"footprints cannot be kept in {self.path}: {error}", RuntimeWarning, stacklevel=3)
            return False
        return True

    def _read_or_put_aside(self) -> _Known:
        try:
            return _parse(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            aside = self.path.with_name(f"{self.path.name}.unreadable")
            self.path.replace(aside)
            warnings.warn(
                f"{self.path} could not be read ({error}); it is {aside.name} now, and all is learned anew",
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
                f"{folder} must be a folder of this user that nobody else can write to; remove it, or set "
                "FLOWER_GPU_STATE_DIR to another folder"
            )


_NEW: Final = Peaks((), 0, 0.0)


def _context_on(gpu: str) -> Key:
    return Key(_CONTEXT, "", gpu)


def _check_bytes(number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
        raise ConfigError(f"a measured size must be a number of bytes from 1 on, not {number!r}")


def _format(known: _Known) -> bytes:
    return json.dumps(
        {"v": VERSION, "peaks": [{**vars(key), **vars(one)} for key, one in known.items()]}
    ).encode()


def _parse(data: bytes) -> _Known:
    """Read a file; ValueError if it is not one of ours."""
    try:
        content = json.loads(data)
        if content["v"] != VERSION:
            raise ValueError(f"version {content['v']!r} instead of {VERSION}")
        return {_parse_key(one): _parse_peaks(one) for one in content["peaks"]}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a file of footprints, {type(error).__name__}: {error}") from None


def _parse_key(one: dict[str, Any]) -> Key:
    sizes = tuple((_a(str, name), _a((int, str), value)) for name, value in one["sizes"])
    return Key(_a(str, one["task"]), _a(str, one["weights"]), _a(str, one["gpu"]), sizes)


def _parse_peaks(one: dict[str, Any]) -> Peaks:
    recent = tuple(_a(int, number) for number in one["recent_bytes"])
    spare, updated_s = float(one["spare"]), float(one["updated_s"])
    outside_bytes = _a(int, one["outside_bytes"])
    if not (recent and 0 < min(recent) <= max(recent) <= _MOST_BYTES and 0 <= outside_bytes <= _MOST_BYTES):
        raise ValueError("a size that cannot be")
    if not (LEAST_SPARE <= spare <= MOST_SPARE and 0 <= updated_s <= _LATEST_S):
        raise ValueError("a share or a time that cannot be")
    return Peaks(recent[-REMEMBERED:], _a(int, one["measured"]), updated_s, spare, outside_bytes)


def _a(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind}")
    return value
