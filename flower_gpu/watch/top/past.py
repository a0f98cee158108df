"""What was seen in the last minutes, and graphs of it: a dot stands for the looks of two seconds or more."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from flower_gpu.watch.top.snapshot import Snapshot

CORES: Final = "cores"  # in the place of a GPU's UUID
_SLOT_S: Final = 2.0
_MOST_SLOTS: Final = 1024  # more than the widest terminal shows
_DOTS: Final = 4  # above each other in a braille letter
#: Its dots from the bottom, left and right.
_LEFT: Final = (0x40, 0x04, 0x02, 0x01)
_RIGHT: Final = (0x80, 0x20, 0x10, 0x08)
#: Letters by how many dots are filled, left and right; an empty one is a space.
_BRAILLE: Final = tuple(
    tuple(
        chr(0x2800 + sum(_LEFT[:left]) + sum(_RIGHT[:right])) if left or right else " " for right in range(5)
    )
    for left in range(5)
)
#: The same for terminals that know ASCII only.
_PLAIN: Final = tuple(tuple(" .::#"[max(left, right)] for right in range(5)) for left in range(5))

Share = float | None


class Past:
    """Shares of memory and time in use, from 0 to 1, by GPU; None where that is not known.

    ``interval_s``: seconds between two looks: each dot has at least one.
    """

    def __init__(self, interval_s: float) -> None:
        self.slot_s = max(_SLOT_S, 2 * interval_s)
        self._slots: deque[_TwoSeconds] = deque(maxlen=_MOST_SLOTS)

    def add(self, snapshot: Snapshot) -> None:
        """Take in what is seen now."""
        number = int(snapshot.time // self.slot_s)
        if not self._slots or self._slots[-1].number < number:
            self._slots.append(_TwoSeconds(number))
        for key, memory, busy in _shares(snapshot):
            self._slots[-1].add(key, memory, busy)

    def memory(self, key: str, count: int) -> list[Share]:
        """Return how much was in use in each of the last slots, the oldest first; of cores: leased."""
        return [slot.memory(key) if slot else None for slot in self._last(count)]

    def busy(self, key: str, count: int) -> list[Share]:
        """Return how busy a GPU, or the cores, were in the last slots."""
        return [slot.busy(key) if slot else None for slot in self._last(count)]

    def _last(self, count: int) -> list[_TwoSeconds | None]:
        if not self._slots:
            return [None] * count
        by_number = {slot.number: slot for slot in self._slots}
        end = self._slots[-1].number + 1
        return [by_number.get(number) for number in range(end - count, end)]


class _TwoSeconds:
    """The looks of two seconds: the most memory, and how busy it was on average."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._memory: dict[str, float] = {}
        self._busy: dict[str, tuple[int, float]] = {}

    def add(self, key: str, memory: Share, busy: Share) -> None:
        if memory is not None:
            self._memory[key] = max(memory, self._memory.get(key, 0.0))
        if busy is not None:
            looks, total = self._busy.get(key, (0, 0.0))
            self._busy[key] = (looks + 1, total + busy)

    def memory(self, key: str) -> Share:
        return self._memory.get(key)

    def busy(self, key: str) -> Share:
        looks, total = self._busy.get(key, (0, 0.0))
        return total / looks if looks else None


def _shares(snapshot: Snapshot) -> Iterator[tuple[str, Share, Share]]:
    for gpu in snapshot.gpus:
        known = gpu.used_bytes is not None and gpu.total_bytes
        memory = (gpu.used_bytes or 0) / gpu.total_bytes if known and gpu.total_bytes else None
        yield gpu.uuid, memory, _part(gpu.utilization_percent)
    if (host := snapshot.resources) is not None:
        yield CORES, host.cores_leased / host.cores if host.cores else None, _part(host.cores_busy_percent)


def _part(percent: float | None) -> Share:
    return None if percent is None else percent / 100


def graph(shares: Sequence[Share], lines: int, *, is_ascii: bool) -> list[str]:
    """Draw shares as lines of text, the top one first; two shares in each letter."""
    dots, letters = _DOTS * lines, _PLAIN if is_ascii else _BRAILLE
    heights = [0 if not share else min(dots, max(round(share * dots), 1)) for share in shares]
    drawn = []
    for below in range(dots - _DOTS, -1, -_DOTS):
        filled = [min(_DOTS, max(0, height - below)) for height in heights]
        pairs = zip(filled[::2], filled[1::2], strict=True)
        drawn.append("".join([letters[left][right] for left, right in pairs]))
    return drawn
