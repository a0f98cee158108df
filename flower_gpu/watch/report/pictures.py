"""The two pictures of a report over time: the memory of the GPUs by lease, and the workers.

A picture consists of panels with a common time axis, one panel for each GPU. The template draws their shapes
as SVG. Heights are in pixels. The time axis is WIDTH units long and stretches to the width of the page. On a
phone the shapes are compressed, while the texts beside them keep their size.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from flower_gpu.printable import duration_text, printable
from flower_gpu.watch.fields import SERVER, call_label, client_key
from flower_gpu.watch.folds.hosts import GPUInfo
from flower_gpu.watch.folds.tally import HOST_LOST, OUT_OF_MEMORY
from flower_gpu.watch.folds.worker_span import EXITING, RUNNING, STARTING, WAITING
from flower_gpu.watch.history import History
from flower_gpu.watch.report.calls import PHASES, CallPhase, CallTry, RunClock
from flower_gpu.watch.report.ticks import ticks
from flower_gpu.watch.report.totals import HeldPart, leased_steps, steps

#: Maximum number of GPUs that are drawn. The table has all GPUs.
MOST_GPUS: Final = 16
#: Maximum number of calls, or of leases, that are drawn as single bars. Above it, their sum is drawn.
MOST_BARS: Final = 2000
#: Number of colours for clients in the style sheet. With more clients, all leases have the same colour.
COLOURS: Final = 14

WIDTH, TITLE_HEIGHT, GAP = 1000, 24, 16
#: Width of the time axis on a phone, in pixels.
NARROW_WIDTH: Final = 290
_MEMORY_HEIGHT, _COUNT_HEIGHT, _LANES_HEIGHT = 150, 64, 700
_LANE, _MIN_LANE, _LETTER = 20.0, 2.0, 7.0
#: Width in pixels of a column. An area that shows a sum has one value per column.
_COLUMN: Final = 2
#: Maximum number of letters of a client's name.
_MAX_LETTERS: Final = 40
_HOST_LETTERS: Final = 20
_GIB: Final = 2**30


@dataclass(frozen=True)
class Bar:
    """A rectangle, or an area with the outline ``path``. The title is shown when the mouse points at it."""

    kind: str  # class in the style sheet
    title: str = ""
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    path: str = ""
    name: str = ""  # text inside the bar on a wide page

    @property
    def has_room_on_a_telephone(self) -> bool:
        """True if the name also fits into the bar on a phone."""
        return self.width * NARROW_WIDTH / WIDTH > _LETTER * len(self.name) + 6


@dataclass(frozen=True)
class Mark:
    """A symbol at a point of a panel."""

    kind: str
    x: float
    y: float


@dataclass
class Panel:
    """The drawing of one GPU. All vertical positions are measured from the top of the panel."""

    title: str
    height: float
    unit: str = ""  # unit of the numbers on the left
    ticks: list[tuple[float, str]] = field(default_factory=list)  # vertical position and number
    bars: list[Bar] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)  # paths by kind
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True)
class Picture:
    """Panels with a common time axis, from top to bottom."""

    title: str
    caption: str
    panels: Sequence[Panel]
    names: Mapping[str, str]  # names for the legend, by kind

    @property
    def legend(self) -> dict[str, str]:
        """The names of the kinds that occur in the picture."""
        drawn: set[str] = set()
        for panel in self.panels:
            drawn |= {bar.kind for bar in panel.bars} | {mark.kind for mark in panel.marks} | set(panel.lines)
        return {kind: name for kind, name in self.names.items() if kind in drawn}

    @property
    def tops(self) -> list[float]:
        """The vertical position of each panel, followed by the end of the last panel."""
        heights = (TITLE_HEIGHT + panel.height + GAP for panel in self.panels)
        return [TITLE_HEIGHT + top for top in itertools.accumulate(heights, initial=0.0)]


class TimeAxis:
    """The time axis of a run. Its unit is minutes or hours for a long run, otherwise seconds."""

    def __init__(self, clock: RunClock, tries: Sequence[CallTry]) -> None:
        self.clock = clock
        self.length_s = max(clock.duration_s, 1e-3)
        limits = [("h", 3600.0), ("min", 60.0)]
        self.unit, unit_s = next((limit for limit in limits if self.length_s > 3 * limit[1]), ("s", 1.0))
        self.ticks = [(self.x(tick * unit_s), f"{tick:g}") for tick in ticks(0.0, self.length_s / unit_s, 10)]
        #: Position of the first call's begin. Before it the run starts up.
        self.work_x = self.x(tries[0].begin_s) if tries else 0.0
        self.pauses_x = [self.x(clock.seconds(begin)) for begin, _ in clock.pauses]

    @property
    def pixel_s(self) -> float:
        """Number of seconds per pixel."""
        return self.length_s / WIDTH

    def x(self, seconds: float) -> float:
        """Return the position of a time, in seconds of the run, on the axis."""
        return WIDTH * seconds / self.length_s

    def means(self, spans: Iterable[tuple[float, float, float]]) -> list[float]:
        """Return the mean of the sum over spans (begin, end, amount) for each column, from left to right."""
        at_s, sums = steps(spans)
        edges = np.linspace(0.0, self.length_s, WIDTH // _COLUMN + 1)
        if not at_s:
            return [0.0] * (len(edges) - 1)
        areas = np.concatenate([[0.0], np.cumsum(np.array(sums[:-1]) * np.diff(at_s))])
        means: list[float] = (np.diff(np.interp(edges, at_s, areas)) / np.diff(edges)).tolist()
        return means


def memory_picture(
    history: History, axis: TimeAxis, holdings: Mapping[str, Sequence[HeldPart]]
) -> Picture | None:
    """Return the picture of used and leased memory by GPU, or None if it would be empty."""
    gpus = [
        gpu for gpu in history.hosts.gpus_of_run if history.hosts.samples.get(gpu.uuid) or holdings[gpu.uuid]
    ]
    if not gpus:
        return None
    shown = gpus[:MOST_GPUS]
    clients = sorted({holding.client for gpu in shown for holding in holdings[gpu.uuid]}, key=client_key)
    kinds = {client: f"c{place}" for place, client in enumerate(name for name in clients if name != SERVER)}
    names = {kind: client_name(client) for client, kind in kinds.items()}
    if len(kinds) > COLOURS:
        kinds, names = dict.fromkeys(kinds, "leased"), {"leased": f"leases of {len(kinds):,} clients"}
    if SERVER in clients:
        kinds[SERVER] = names[SERVER] = SERVER
    if sum(len(holdings[gpu.uuid]) for gpu in shown) > MOST_BARS:
        kinds, names = {}, {"leased": "leases"}
    panels = [_memory_panel(history, axis, gpu, gpus, holdings[gpu.uuid], kinds) for gpu in shown]
    names |= {"used": "in use", "limit": "limit of leases", "before": "in use before"}
    names[OUT_OF_MEMORY] = OUT_OF_MEMORY
    caption = "Coloured: leases, one on top of the other. Line: all memory in use, as the driver reports."
    if len(gpus) > len(shown):
        caption += f" The first {len(shown)} of {len(gpus)} GPUs."
    return Picture("GPU memory", caption, panels, names)


def _memory_panel(
    history: History,
    axis: TimeAxis,
    gpu: GPUInfo,
    gpus: Sequence[GPUInfo],
    holdings: Sequence[HeldPart],
    kinds: Mapping[str, str],
) -> Panel:
    """Return the memory panel of a GPU.

    ``kinds``: style of the leases by client. If it is empty, the sum of all leases is drawn.
    """
    title = ", ".join(filter(None, (gpu_name(gpu, gpus), gpu.name)))
    panel = Panel(title, _MEMORY_HEIGHT, "GiB")
    readings = [(sample.time, sample.used_bytes) for sample in history.hosts.samples.get(gpu.uuid, ())]
    samples = [(time, used) for time, used in readings if used is not None]
    known = [gpu.total_bytes or 0, gpu.capacity_bytes or 0, *leased_steps(holdings)[1]]
    top = max(*known, *(used for _, used in samples)) * 1.04 or _GIB

    def y(nbytes: float) -> float:
        return panel.height * (1 - nbytes / top)

    panel.ticks = [(y(tick * _GIB), f"{tick:g}") for tick in ticks(0.0, top / _GIB, 4)]
    panel.bars = _lease_bars(axis, holdings, kinds, y)
    if gpu.capacity_bytes:
        panel.lines["limit"] = f"M0 {y(gpu.capacity_bytes):.1f}H{WIDTH}"
    if samples:
        panel.lines["before"] = f"M0 {y(samples[0][1]):.1f}H{WIDTH}"
        highest: dict[float, float] = {}  # highest memory by column
        for time, used in samples:
            x = round(axis.x(axis.clock.seconds(time)), 0 if len(samples) > WIDTH else 1)
            highest[x] = max(used, highest.get(x, 0))
        panel.lines["used"] = "M" + "L".join(f"{x:g} {y(used):.1f}" for x, used in highest.items())
    panel.marks = [
        Mark(OUT_OF_MEMORY, axis.x(axis.clock.seconds(event.time)), 4.0)
        for event in history.calls.out_of_memory
        if event.uuid == gpu.uuid
    ]
    return panel


def _lease_bars(
    axis: TimeAxis, holdings: Sequence[HeldPart], kinds: Mapping[str, str], y: Callable[[float], float]
) -> list[Bar]:
    if not kinds:
        means = axis.means((holding.begin_s, holding.end_s, holding.memory_bytes) for holding in holdings)
        return [Bar("leased", path=_area([y(0)] * len(means), map(y, means)))]
    return [
        Bar(
            kinds[holding.client],
            f"{client_name(holding.client)}: {holding.memory_bytes / _GIB:.2f} GiB"
            f" for {duration_text(holding.end_s - holding.begin_s)}",
            x=axis.x(begin_s),
            width=axis.x(end_s) - axis.x(begin_s),
            y=y(bottom + holding.memory_bytes),
            height=y(0) - y(holding.memory_bytes),
        )
        for holding, begin_s, end_s, bottom in stacked(holdings, axis.pixel_s)
    ]


def stacked(holdings: Sequence[HeldPart], least_s: float) -> list[tuple[HeldPart, float, float, int]]:
    """Return the leases stacked on top of each other, as pieces that do not overlap.

    A piece consists of a lease, its begin, its end, and the sum in bytes of the leases below it. Changes
    within ``least_s`` seconds are merged into the last of them, because leases follow each other within
    milliseconds.
    """
    slots = pack([(holding.begin_s, holding.end_s) for holding in holdings])
    pending = sorted(zip(slots, holdings, strict=True), key=lambda pair: pair[1].begin_s, reverse=True)
    stack: list[tuple[int, HeldPart]] = []
    begun: dict[int, tuple[float, int]] = {}  # open piece of each lease: its begin and the bytes below it
    pieces = []
    for at in {int(at / least_s): at for at in leased_steps(holdings)[0]}.values():
        while pending and pending[-1][1].begin_s <= at:
            stack.append(pending.pop())
        bottom = 0
        for _, holding in sorted(stack, key=lambda pair: pair[0]):
            since, previous = begun.get(id(holding), (at, bottom))
            is_over = holding.end_s <= at
            if is_over or previous != bottom:
                pieces += [(holding, since, at, previous)] if since < at else []
                since = at
            begun[id(holding)] = since, bottom
            bottom += 0 if is_over else holding.memory_bytes
        stack = [(slot, holding) for slot, holding in stack if holding.end_s > at]
    return pieces


def workers_picture(history: History, axis: TimeAxis, tries: Sequence[CallTry]) -> Picture | None:
    """Return the picture of workers and waiting calls by GPU, or None for a run without calls."""
    if not tries:
        return None
    groups = _groups(history, [attempt for attempt in tries if attempt.worker])
    panels = []
    if waits := [part for attempt in tries for part in attempt.parts if part.phase == WAITING]:
        panels.append(_counts_panel("waiting for a lease", axis, {WAITING: waits}))
    without = [attempt for attempt in tries if not attempt.worker and attempt.has_failed]
    for panel in panels:
        panel.marks = [Mark("failed", axis.x(attempt.end_s), panel.height - 6) for attempt in without]
    if len(tries) > MOST_BARS:
        caption = "How many calls were in which phase."
        for title, group in groups.items():
            parts = {
                phase: [part for attempt in group for part in attempt.parts if part.phase == phase]
                for phase in (RUNNING, STARTING, EXITING)
            }
            panels.append(_counts_panel(title, axis, parts))
    else:
        caption = (
            "Each bar is a call: the start of its worker, the task, and the worker's exit. Point at one for "
            "more."
        )
        lanes = {title: lanes_of(group) for title, group in groups.items()}
        count = sum(1 + max(numbers, default=0) for numbers in lanes.values())
        lane_height = min(_LANE, max(_MIN_LANE, _LANES_HEIGHT / max(1, count)))
        for title, group in groups.items():
            panels.append(_lanes_panel(title, axis, group, lanes[title], lane_height))
    kinds = (*PHASES, "failed", OUT_OF_MEMORY, HOST_LOST, "no end")
    return Picture("Workers", caption, panels, {kind: kind for kind in kinds})


def _groups(history: History, tries: Sequence[CallTry]) -> dict[str, list[CallTry]]:
    """Return the calls by the name of their GPU, or of their host's CPU."""
    gpus = history.hosts.gpus_of_run
    groups: dict[str, list[CallTry]] = {gpu_name(gpu, gpus): [] for gpu in gpus}
    names = {gpu.uuid: gpu_name(gpu, gpus) for gpu in gpus}
    on_cpu = [attempt for attempt in tries if not any(uuid in names for uuid in attempt.gpus)]
    hosts = {attempt.span.host for attempt in on_cpu}
    for attempt in tries:
        for uuid in attempt.gpus:
            if uuid in names:
                groups[names[uuid]].append(attempt)
    for attempt in on_cpu:
        groups.setdefault(f"CPU{_on_host(attempt.span.host, hosts)}", []).append(attempt)
    return {name: members for name, members in groups.items() if members}


def _counts_panel(title: str, axis: TimeAxis, parts: Mapping[str, Sequence[CallPhase]]) -> Panel:
    """Return a panel with the number of calls in each phase, stacked on top of each other."""
    panel = Panel(title, _COUNT_HEIGHT, "calls")
    means = {
        phase: np.array(axis.means((part.begin_s, part.end_s, 1) for part in phase_parts))
        for phase, phase_parts in parts.items()
        if phase_parts
    }
    top = max(float(sum(means.values(), np.zeros(1)).max()), 1.0) * 1.04
    whole = [tick for tick in ticks(0.0, top, 3) if tick == int(tick)]
    panel.ticks = [(panel.height * (1 - tick / top), f"{tick:g}") for tick in whole]
    floor = np.full(1, panel.height)
    for phase, counts in means.items():
        above = floor - panel.height * counts / top
        floor = np.broadcast_to(floor, above.shape)
        panel.bars.append(Bar(phase, path=_area(floor.tolist(), above.tolist())))
        floor = above
    return panel


def _lanes_panel(
    title: str, axis: TimeAxis, tries: Sequence[CallTry], lanes: Sequence[int], lane_height: float
) -> Panel:
    """Return a panel with calls as bars in lanes."""
    panel = Panel(title, (1 + max(lanes)) * lane_height)
    gap = 1.0 if lane_height >= 6 else 0.0
    for attempt, lane in zip(tries, lanes, strict=True):
        y, label, client = lane * lane_height, _call_text(attempt), printable(attempt.span.client)
        parts = [part for part in attempt.parts if part.phase != WAITING]
        widest = max(parts, key=lambda part: (part.phase == RUNNING, part.seconds), default=None)
        for part in parts:
            x, width = axis.x(part.begin_s), axis.x(part.end_s) - axis.x(part.begin_s)
            has_room = part is widest and lane_height >= _LANE and width > _LETTER * len(client) + 6
            name = client if has_room else ""
            panel.bars.append(Bar(part.phase, label, x, y + gap, width, lane_height - 2 * gap, name=name))
        if kind := _end_kind(attempt):
            panel.marks.append(Mark(kind, axis.x(attempt.end_s), y + lane_height / 2))
    return panel


def _end_kind(attempt: CallTry) -> str:
    """Return the kind of mark for the end of a call, or "" if the call ended well."""
    if attempt.outcome in (OUT_OF_MEMORY, HOST_LOST):
        return attempt.outcome
    if attempt.has_failed:
        return "failed"
    return "" if attempt.outcome else "no end"


def _call_text(attempt: CallTry) -> str:
    """Return one line with the task, client, round, phases and outcome of a call."""
    names = {"task": attempt.span.task, "client": attempt.span.client}
    of_round = "" if attempt.span.round is None else f" in round {attempt.span.round}"
    parts = ", ".join(f"{part.phase} {duration_text(part.seconds)}" for part in attempt.parts)
    return f"{call_label(names)}{of_round}: {parts}; {attempt.outcome or 'no end'}"


def lanes_of(tries: Sequence[CallTry]) -> list[int]:
    """Return a lane, counted from 0, for each call with a worker. Workers in the same lane never overlap.

    All calls of a worker are in the same lane.
    """
    spans: dict[int, tuple[float, float]] = {}
    processes = [attempt.worker.process if attempt.worker else 0 for attempt in tries]
    for process, attempt in zip(processes, tries, strict=True):
        begin_s = next((part.begin_s for part in attempt.parts if part.phase != WAITING), attempt.end_s)
        begun_s, ended_s = spans.get(process, (begin_s, attempt.end_s))
        spans[process] = min(begun_s, begin_s), max(ended_s, attempt.end_s)
    lanes = dict(zip(spans, pack(list(spans.values())), strict=True))
    return [lanes[process] for process in processes]


def pack(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return a lane, counted from 0, for each span (begin, end), so that spans in a lane do not overlap.

    The number of lanes is minimal. A span may begin at the time at which another span in its lane ends.
    """
    lanes = [0] * len(spans)
    busy: list[tuple[float, int]] = []  # end of the span, and lane
    free: list[int] = []
    for place in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[place]
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lanes[place] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lanes[place]))
    return lanes


def _area(floor: Sequence[float], tops: Iterable[float]) -> str:
    """Return the SVG path around adjacent columns. Each column reaches from its floor to its top."""
    edges = [_COLUMN * place for place in range(len(floor) + 1)]
    forward = [f"V{top:.1f}H{right}" for top, right in zip(tops, edges[1:], strict=True)]
    backward = [f"V{low:.1f}H{left}" for low, left in reversed(list(zip(floor, edges, strict=False)))]
    return f"M0 {floor[0]:.1f}{''.join(forward)}{''.join(backward)}z"


# Names


def gpu_name(gpu: GPUInfo, others: Sequence[GPUInfo]) -> str:
    """Return the name of a GPU: its index, and its host if the run has several hosts.

    The UUID is added if another GPU of its host has the same index, as MIG devices do.
    """
    where = _on_host(gpu.host, [other.host for other in others])
    if gpu.index < 0:
        return f"GPU {gpu.uuid}{where}"
    if sum((other.host, other.index) == (gpu.host, gpu.index) for other in others) > 1:
        return f"GPU {gpu.index} ({gpu.uuid[:12]}){where}"
    return f"GPU {gpu.index}{where}"


def _on_host(host: str, others: Iterable[str]) -> str:
    """Return a host as text, such as ``" on node7"``, or "" if all are on the same host."""
    if not host or len(set(others)) == 1:
        return ""
    # Shorten a long name. Readers need its domain least, and then its beginning.
    return f" on {host if len(host) <= _HOST_LETTERS else host.partition('.')[0][-_HOST_LETTERS:]}"


def client_name(client: str) -> str:
    """Return the name of a client as text: ``"client 3"``, ``"server"``."""
    if client == SERVER:
        return SERVER
    return f"client {client[:_MAX_LETTERS]}" if client else "unnamed client"
