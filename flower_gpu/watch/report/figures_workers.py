"""Picture of the workers: which ran when, on which GPU, and what they spent their time with.

A call is a bar in a lane: no bar lies on another one, and lanes are as few as that takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flower_gpu.printable import printable
from flower_gpu.watch.history import History
from flower_gpu.watch.report import drawing
from flower_gpu.watch.report.calls import PHASES, CallPhase, CallTry, RunClock
from flower_gpu.watch.report.drawing import Picture, counted, gpu_name, on_host, places
from flower_gpu.watch.report.totals import steps
from flower_gpu.watch.spans import EXITING, HOST_LOST, OUT_OF_MEMORY, RUNNING, STARTING, WAITING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = {
    WAITING: drawing.YELLOW,
    STARTING: drawing.SKY,
    RUNNING: drawing.BLUE,
    EXITING: drawing.PURPLE,
}
# The same in dark mode, as the bars.
_EDGE, _ON_BLUE, _ON_OTHERS = "#707070", "#fefefe", "#111111"
_MOST_LANES_WITH_WAITING: Final = 60
_SMALL_BARS: Final = 300  # of which each has edges, hatches, and its client's name where there is room
# Where most bars are thinner, how many workers do what is drawn instead, in so many columns per inch.
_LEAST_BAR_IN, _COLUMNS_PER_IN = 0.025, 24
_LANE_IN, _MOST_IN = 0.24, 9.0
_GAP: Final = 0.8  # lanes between groups


@dataclass(frozen=True)
class LaneRow:
    """A call, and the lane that it lies in, from 0."""

    call: CallTry
    lane: int
    parts: tuple[CallPhase, ...]


@dataclass(frozen=True)
class LaneGroup:
    """The lanes of one GPU, or of the CPU, and what lies there."""

    label: str
    lanes: int
    rows: tuple[LaneRow, ...]


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
    spans: dict[object, tuple[float, float]] = {}
    for call in shown:
        begin, end = parts[id(call)][0].begin_s, parts[id(call)][-1].end_s
        before = spans.get(call.process or call, (begin, end))
        spans[call.process or call] = (min(begin, before[0]), max(end, before[1]))
    lane_of = dict(zip(spans, pack(list(spans.values())), strict=True))
    rows = tuple(LaneRow(call, lane_of[call.process or call], parts[id(call)]) for call in shown)
    return LaneGroup(label, 1 + max(lane_of.values(), default=-1), rows)


def waiting_steps(calls: Sequence[CallTry]) -> tuple[list[float], list[int]]:
    """Return when the number of calls that wait for a lease changes, and what it is from then on."""
    return steps(
        (part.begin_s, part.end_s, 1) for call in calls for part in call.parts if part.phase == WAITING
    )


def workers_picture(
    history: History, clock: RunClock, tries: Sequence[CallTry], width_in: float
) -> Picture | None:
    """Draw all calls as bars in lanes, by GPU; None where there was no call."""
    if not tries:
        return None
    with_waiting = True
    groups = _groups(history, tries, with_waiting)
    if sum(one.lanes for one in groups) > _MOST_LANES_WITH_WAITING:
        with_waiting = False  # the line would take all the room: it is counted instead
        groups = _groups(history, tries, with_waiting)
    bars = sum(len(one.rows) for one in groups)
    is_dense = bars > _SMALL_BARS
    lanes = sum(one.lanes for one in groups) + _GAP * (len(groups) - 1)
    height = min(_MOST_IN, max(1.0, _LANE_IN * lanes))
    waiting = ([], []) if with_waiting else waiting_steps(tries)
    strip = 1.1 if waiting[0] else 0.0
    figure = drawing.new_figure(width_in, height + strip + 0.1)
    handles: dict[str, Any] = {}
    if strip:
        above, axes = figure.subplots(2, 1, height_ratios=[strip, height])
        _draw_waiting(above, clock, waiting)
    else:
        axes = figure.subplots()
    inch_s = drawing.inch_s(axes, clock)
    is_fine = is_dense and median(one.end_s - one.begin_s for one in tries) < _LEAST_BAR_IN * inch_s
    columns = int(clock.length_s / inch_s * _COLUMNS_PER_IN) if is_fine else 0
    handles |= _draw_groups(axes, clock, groups, is_dense, columns)
    drawing.time_axis(axes, clock)
    label_in = 0.2 + drawing.LETTER_IN * max(len(one.label) for one in groups)
    drawing.arrange(figure, handles, left_in=max(0.6, label_in), top_in=0.1, gaps_in=(0.0, 0.15))
    return Picture(
        "workers",
        "Workers",
        _caption(groups, with_waiting, is_dense, is_fine),
        f"Bars of {counted(bars, 'call')} over time, by GPU",
        figure,
    )


def _groups(history: History, tries: Sequence[CallTry], with_waiting: bool) -> list[LaneGroup]:
    gpus = history.gpus_of_run
    known = {gpu.uuid for gpu in gpus}
    on_gpu = {gpu.uuid: [one for one in tries if gpu.uuid in one.gpus] for gpu in gpus}
    rest = [one for one in tries if not known.intersection(one.gpus)]
    on_cpu = [one for one in rest if one.has_worker]
    without = [one for one in rest if not one.has_worker]
    groups = [group(gpu_name(gpu, gpus), on_gpu[gpu.uuid], with_waiting) for gpu in gpus]
    hosts = sorted({one.host for one in on_cpu})
    groups += [
        group(f"CPU{on_host(host, hosts)}", [one for one in on_cpu if one.host == host], with_waiting)
        for host in hosts
    ]
    groups.append(group("no lease", without, with_waiting))
    return [one for one in groups if one.rows]


def _draw_groups(
    axes: Axes, clock: RunClock, groups: Sequence[LaneGroup], is_dense: bool, columns: int
) -> dict[str, Any]:
    """Draw bars, or so many columns, from the top to the bottom; return what a legend is made of."""
    tops, at = [], 0.0
    for one in groups:
        tops.append(at)
        at += one.lanes + _GAP
    placed = [(top + row.lane, row) for top, one in zip(tops, groups, strict=True) for row in one.rows]
    if columns:
        handles = _draw_columns(axes, clock, list(zip(tops, groups, strict=True)), columns)
    else:
        handles = {
            phase: handle
            for phase in PHASES
            if (handle := _draw_phase(axes, clock, placed, phase, is_dense)) is not None
        }
    if not is_dense:
        _write_clients(axes, clock, placed)
    handles |= _draw_ends(axes, clock, placed, is_dense)
    axes.set_ylim(at - _GAP + 0.15, -0.15)
    axes.set_yticks(
        [top + one.lanes / 2 for top, one in zip(tops, groups, strict=True)], [one.label for one in groups]
    )
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    for top in tops[1:]:
        axes.axhline(top - _GAP / 2, color=drawing.GREY, linewidth=0.8)
    drawing.dress(axes)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x", color=drawing.RULE, linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    return handles


def _draw_phase(
    axes: Axes, clock: RunClock, placed: Sequence[tuple[float, LaneRow]], phase: str, is_dense: bool
) -> Any:
    from matplotlib.patches import Patch

    found = [
        (part.begin_s, part.end_s, lane) for lane, row in placed for part in row.parts if part.phase == phase
    ]
    if not found:
        return None
    begin, end, lane = np.array(found, dtype=float).T
    gap = 0.0 if is_dense else 0.06
    look: dict[str, Any] = {"facecolor": _COLOURS[phase], "rasterized": is_dense}
    if not is_dense:
        look |= {"edgecolor": _EDGE, "linewidth": 0.4}
        if phase == WAITING:
            look["hatch"] = "////"
    drawing.draw_bars(axes, places(clock, begin), places(clock, end), lane + gap, lane + 1 - gap, **look)
    return Patch(**look | {"rasterized": False})


def _draw_columns(
    axes: Axes, clock: RunClock, groups: Sequence[tuple[float, LaneGroup]], columns: int
) -> dict[str, Any]:
    """Draw for each part of the time how many calls were in which phase, on average."""
    from matplotlib.patches import Patch

    edges = np.linspace(0.0, clock.length_s, columns + 1)
    left, right = places(clock, edges[:-1]), places(clock, edges[1:])
    handles: dict[str, Any] = {}
    for top, one in groups:
        floor = np.full(columns, top + one.lanes)
        for phase in (RUNNING, STARTING, EXITING, WAITING):
            parts = [part for row in one.rows for part in row.parts if part.phase == phase]
            if parts:
                begin, end = np.array([(part.begin_s, part.end_s) for part in parts], dtype=float).T
                done = np.array([np.clip(edge - begin, 0.0, end - begin).sum() for edge in edges])
                height = np.diff(done) / np.diff(edges)
                drawing.draw_bars(
                    axes, left, right, floor - height, floor, facecolor=_COLOURS[phase], linewidth=0
                )
                floor = floor - height
                handles[phase] = Patch(facecolor=_COLOURS[phase])
    return handles


def _write_clients(axes: Axes, clock: RunClock, placed: Sequence[tuple[float, LaneRow]]) -> None:
    """Write a client's name where it has room."""
    inch_s = drawing.inch_s(axes, clock)
    for lane, row in placed:
        name = printable(row.call.client)
        room = [
            part for part in row.parts if part.seconds / inch_s > 1.1 * drawing.LETTER_IN * len(name) + 0.06
        ]
        if not name or not room:
            continue
        part = max(room, key=lambda part: (part.phase == RUNNING, part.seconds))
        axes.text(
            (part.begin_s + part.end_s) / 2 / clock.unit[1],
            lane + 0.52,
            name,
            fontsize=7.5,
            ha="center",
            va="center",
            color=_ON_BLUE if part.phase == RUNNING else _ON_OTHERS,
            bbox={"facecolor": _COLOURS[part.phase], "edgecolor": "none", "pad": 0.5},
            parse_math=False,
            zorder=3,
            clip_on=True,
        )


def _draw_ends(
    axes: Axes, clock: RunClock, placed: Sequence[tuple[float, LaneRow]], is_dense: bool
) -> dict[str, Any]:
    """Mark how calls have ended that have not ended well."""
    kinds: list[tuple[str, str, str, Callable[[CallTry], bool]]] = [
        ("failed", "X", drawing.ORANGE, lambda call: call.has_failed and call.outcome != OUT_OF_MEMORY),
        ("out of memory", "v", drawing.ORANGE, lambda call: call.outcome == OUT_OF_MEMORY),
        ("host lost", "s", drawing.GREEN, lambda call: call.outcome == HOST_LOST),
        ("no end", ">", drawing.GREEN, lambda call: not call.outcome),
    ]
    handles = {}
    for label, marker, colour, is_meant in kinds:
        found = [(row.parts[-1].end_s, lane + 0.5) for lane, row in placed if is_meant(row.call)]
        if found:
            seconds, lanes = np.array(found, dtype=float).T
            size = 22 if is_dense else 42
            handles[label] = drawing.draw_marks(axes, places(clock, seconds), lanes, marker, colour, size)
    return handles


def _draw_waiting(axes: Axes, clock: RunClock, steps: tuple[list[float], list[int]]) -> None:
    seconds, counts = places(clock, steps[0]), np.array(steps[1], dtype=float)
    look = {"color": drawing.INK, "linewidth": 0.8}
    drawing.draw_steps(axes, seconds, counts, "post", _COLOURS[WAITING], **look)
    axes.set_ylim(bottom=0)
    drawing.dress(axes, y_label="waiting")
    drawing.time_axis(axes, clock, has_label=False)


def _caption(groups: Sequence[LaneGroup], with_waiting: bool, is_dense: bool, is_fine: bool) -> str:
    lines = [
        "Each bar is a call: its wait for a lease, the start of its worker, the task, and the worker's exit."
    ]
    if is_fine:
        lines[0] = "How many calls were in which phase, from the bottom to the top; a column has many calls."
    elif not with_waiting:
        lines[0] = "Each bar is a call: the start of its worker, the task, and the worker's exit."
    if not with_waiting:
        lines.append("How many calls wait for a lease is counted above them.")
    elif not is_dense:
        lines.append("The number in it is its client, where there is room.")
    if any(one.label == "no lease" for one in groups):
        lines.append("Below are calls that got no lease, or no worker.")
    return " ".join(lines)
