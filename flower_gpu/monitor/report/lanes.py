"""Where bars lie in a picture: none on another, and as few rows as that takes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from flower_gpu.monitor.report.calls import CallTry, Part
from flower_gpu.monitor.spans import WAITING


@dataclass(frozen=True)
class Row:
    """A call, and the lane that it lies in, from 0."""

    call: CallTry
    lane: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class LaneGroup:
    """The lanes of one GPU, or of the CPU.

    Parameters
    ----------
    label : str
        What they are of.
    lanes : int
        How many.
    rows : tuple of Row
        What lies there.
    """

    label: str
    lanes: int
    rows: tuple[Row, ...]


def pack(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return a lane for each span, such that no two overlap in one lane; it takes the fewest possible.

    Parameters
    ----------
    spans : sequence of (float, float)
        Begin and end. One may begin where another ends.

    Returns
    -------
    list of int
        Their lanes, from 0, in the same order.
    """
    lanes = [0] * len(spans)
    ends: list[tuple[float, int]] = []
    free: list[int] = []
    used = 0
    for place in sorted(range(len(spans)), key=lambda place: spans[place]):
        begin, end = spans[place]
        while ends and ends[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, used = used, used + 1
        lanes[place] = lane
        heapq.heappush(ends, (end, lane))
    return lanes


def group(label: str, calls: Sequence[CallTry], with_waiting: bool) -> LaneGroup:
    """Put calls into lanes; those that one worker handles into the same.

    Parameters
    ----------
    label : str
        Of the group.
    calls : sequence of CallTry
        What is to be seen in it.
    with_waiting : bool
        Whether the wait for a lease is shown as well.
    """
    parts = {id(call): tuple(p for p in call.parts if with_waiting or p.phase != WAITING) for call in calls}
    shown = [call for call in calls if parts[id(call)]]
    spans: dict[str, tuple[float, float]] = {}
    for call in shown:
        begin, end = parts[id(call)][0].begin_s, parts[id(call)][-1].end_s
        before = spans.get(call.process, (begin, end))
        spans[call.process] = (min(begin, before[0]), max(end, before[1]))
    lane_of = dict(zip(spans, pack(list(spans.values())), strict=True))
    rows = tuple(Row(call, lane_of[call.process], parts[id(call)]) for call in shown)
    return LaneGroup(label, 1 + max(lane_of.values(), default=-1), rows)


def waiting_steps(calls: Sequence[CallTry]) -> tuple[list[float], list[int]]:
    """Count who waits for a lease.

    Returns
    -------
    tuple of (list of float, list of int)
        Seconds, and how many wait from each on.
    """
    changes: dict[float, int] = {}
    for call in calls:
        for part in call.parts:
            if part.phase == WAITING:
                changes[part.begin_s] = changes.get(part.begin_s, 0) + 1
                changes[part.end_s] = changes.get(part.end_s, 0) - 1
    seconds, counts, count = [], [], 0
    for at in sorted(changes):
        count += changes[at]
        seconds.append(at)
        counts.append(count)
    return seconds, counts
