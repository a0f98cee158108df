"""Where bars lie in a picture: none on another, and as few rows as that takes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from flower_gpu.watch.report.calls import CallTry, Part
from flower_gpu.watch.report.leases import steps
from flower_gpu.watch.spans import WAITING


@dataclass(frozen=True)
class Row:
    """A call, and the lane that it lies in, from 0."""

    call: CallTry
    lane: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class LaneGroup:
    """The lanes of one GPU, or of the CPU, and what lies there."""

    label: str
    lanes: int
    rows: tuple[Row, ...]


def pack(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return a lane, from 0, for each span (begin, end): no two overlap in one lane, and lanes are few.

    A span may begin where another ends.
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
    """Put calls into lanes, those that one worker handles into the same; with their waits, or without."""
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
    """Return when the number of calls that wait for a lease changes, and what it is from then on."""
    return steps(
        (part.begin_s, part.end_s, 1) for call in calls for part in call.parts if part.phase == WAITING
    )
