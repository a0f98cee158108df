"""Two pictures of a report: the memory of the GPUs by lease, and the workers, each over time.

A picture is panels over the same axis of time, one for each GPU, whose shapes the template draws as SVG.
Heights are pixels. The axis of time is WIDTH units long, and as wide as the page has room for: a telephone
compresses the shapes, and the texts beside them keep their size.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from flower_gpu.printable import duration_text, printable
from flower_gpu.watch.fields import SERVER, call_label, client_key
from flower_gpu.watch.history import History
from flower_gpu.watch.report.calls import PHASES, CallPhase, CallTry, RunClock
from flower_gpu.watch.report.totals import HeldPart, leased_steps, steps
from flower_gpu.watch.spans import (
    EXITING,
    HOST_LOST,
    OUT_OF_MEMORY,
    RUNNING,
    STARTING,
    WAITING,
    GPUInfo,
)

#: More are not drawn; the table has all.
MOST_GPUS: Final = 16
#: More calls, or more leases of a GPU, are drawn as how many, or how much, there is at a time.
MOST_BARS: Final = 2000
#: Clients that each have a colour of their own: the style sheet has so many. With more, all have the same.
COLOURS: Final = 14

WIDTH, TITLE_HEIGHT, GAP = 1000, 24, 16
#: The width of the axis of time on a telephone, in pixels.
NARROW_WIDTH: Final = 290
_MEMORY_HEIGHT, _COUNT_HEIGHT, _LANES_HEIGHT = 150, 64, 700
_LANE, _LEAST_LANE, _LETTER = 20.0, 2.0, 7.0
_COLUMN: Final = 2  # what is drawn as a sum has one value for so many pixels
_MOST_LETTERS: Final = 40  # of a name
_HOST_LETTERS: Final = 20
_GIB: Final = 2**30


@dataclass(frozen=True)
class Bar:
    """A rectangle, or an area that is drawn as ``path``; pointing at it shows its title."""

    kind: str  # its class in the style sheet
    title: str = ""
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    path: str = ""
    name: str = ""  # written in it where the page is wide

    @property
    def has_room_on_a_telephone(self) -> bool:
        """Whether its name has room in it there, too."""
        return self.width * NARROW_WIDTH / WIDTH > _LETTER * len(self.name) + 6


@dataclass(frozen=True)
class Mark:
    """A sign at one place."""

    kind: str
    x: float
    y: float


@dataclass
class Panel:
    """What is drawn of one GPU. All heights are from the panel's top."""

    title: str
    height: float
    unit: str = ""  # of the numbers at the left
    ticks: list[tuple[float, str]] = field(default_factory=list)  # height, number
    bars: list[Bar] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)  # paths by kind
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True)
class Picture:
    """Panels over one axis of time, from the top to the bottom."""

    title: str
    caption: str
    panels: Sequence[Panel]
    names: Mapping[str, str]  # of kinds

    @property
    def legend(self) -> dict[str, str]:
        """The names in the picture."""
        drawn: set[str] = set()
        for panel in self.panels:
            drawn |= {bar.kind for bar in panel.bars} | {mark.kind for mark in panel.marks} | set(panel.lines)
        return {kind: name for kind, name in self.names.items() if kind in drawn}

    @property
    def tops(self) -> list[float]:
        """Where each panel begins, and then where all of them end."""
        heights = (TITLE_HEIGHT + panel.height + GAP for panel in self.panels)
        return [TITLE_HEIGHT + top for top in itertools.accumulate(heights, initial=0.0)]


class TimeAxis:
    """Where the seconds of a run lie; minutes or hours are its unit where the run is long."""

    def __init__(self, clock: RunClock, tries: Sequence[CallTry]) -> None:
        self.clock = clock
        self.length_s = max(clock.duration_s, 1e-3)
        limits = [("h", 3600.0), ("min", 60.0)]
        self.unit, unit_s = next((one for one in limits if self.length_s > 3 * one[1]), ("s", 1.0))
        self.ticks = [(self.x(tick * unit_s), f"{tick:g}") for tick in ticks(self.length_s / unit_s, 10)]
        #: Where the first call begins: before it the run starts up.
        self.work_x = self.x(tries[0].begin_s) if tries else 0.0
        self.pauses_x = [self.x(clock.seconds(begin)) for begin, _ in clock.pauses]

    @property
    def pixel_s(self) -> float:
        """How many seconds lie in a pixel."""
        return self.length_s / WIDTH

    def x(self, seconds: float) -> float:
        """Return where a moment of the run lies."""
        return WIDTH * seconds / self.length_s

    def means(self, spans: Iterable[tuple[float, float, float]]) -> list[float]:
        """Return the mean sum over spans (begin, end, amount) in each column, from the left to the right."""
        at_s, sums = steps(spans)
        edges = np.linspace(0.0, self.length_s, WIDTH // _COLUMN + 1)
        if not at_s:
            return [0.0] * (len(edges) - 1)
        areas = np.concatenate([[0.0], np.cumsum(np.array(sums[:-1]) * np.diff(at_s))])
        found: list[float] = (np.diff(np.interp(edges, at_s, areas)) / np.diff(edges)).tolist()
        return found


def ticks(most: float, count: int) -> list[float]:
    """Return round numbers from 0 to ``most``, about so many."""
    if not 0 < most < math.inf:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next((size * power for size in (1, 2, 5) if size * power * count >= most), 10 * power)
    return [number * step for number in range(int(most / step) + 1)]


def memory_picture(
    history: History, axis: TimeAxis, holdings: Mapping[str, Sequence[HeldPart]]
) -> Picture | None:
    """Return how much memory was in use and how much was leased, for each GPU."""
    gpus = [gpu for gpu in history.gpus_of_run if history.samples.get(gpu.uuid) or holdings[gpu.uuid]]
    if not gpus:
        return None
    shown = gpus[:MOST_GPUS]
    clients = sorted({one.client for gpu in shown for one in holdings[gpu.uuid]}, key=client_key)
    kinds = {client: f"c{place}" for place, client in enumerate(one for one in clients if one != SERVER)}
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
    caption = "Coloured: leases, one on top of the other. Line: all memory in use, by the driver's word."
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
    """Draw a GPU. ``kinds`` says how leases of each client look; empty: the leases are drawn as their sum."""
    title = ", ".join(filter(None, (gpu_name(gpu, gpus), gpu.name)))
    panel = Panel(title, _MEMORY_HEIGHT, "GiB")
    told = [(one.time, one.used_bytes) for one in history.samples.get(gpu.uuid, ())]
    samples = [(time, used) for time, used in told if used is not None]
    known = [gpu.total_bytes or 0, gpu.capacity_bytes or 0, *leased_steps(holdings)[1]]
    top = max(*known, *(used for _, used in samples)) * 1.04 or _GIB

    def y(nbytes: float) -> float:
        return panel.height * (1 - nbytes / top)

    panel.ticks = [(y(tick * _GIB), f"{tick:g}") for tick in ticks(top / _GIB, 4)]
    panel.bars = _lease_bars(axis, holdings, kinds, y)
    if gpu.capacity_bytes:
        panel.lines["limit"] = f"M0 {y(gpu.capacity_bytes):.1f}H{WIDTH}"
    if samples:
        panel.lines["before"] = f"M0 {y(samples[0][1]):.1f}H{WIDTH}"
        highest: dict[float, float] = {}  # in each column
        for time, used in samples:
            x = round(axis.x(axis.clock.seconds(time)), 0 if len(samples) > WIDTH else 1)
            highest[x] = max(used, highest.get(x, 0))
        panel.lines["used"] = "M" + "L".join(f"{x:g} {y(used):.1f}" for x, used in highest.items())
    panel.marks = [
        Mark(OUT_OF_MEMORY, axis.x(axis.clock.seconds(event.time)), 4.0)
        for event in history.out_of_memory
        if event.uuid == gpu.uuid
    ]
    return panel


def _lease_bars(
    axis: TimeAxis, holdings: Sequence[HeldPart], kinds: Mapping[str, str], y: Callable[[float], float]
) -> list[Bar]:
    if not kinds:
        means = axis.means((one.begin_s, one.end_s, one.memory_bytes) for one in holdings)
        return [Bar("leased", path=_area([y(0)] * len(means), map(y, means)))]
    return [
        Bar(
            kinds[one.client],
            f"{client_name(one.client)}: {one.memory_bytes / _GIB:.2f} GiB"
            f" for {duration_text(one.end_s - one.begin_s)}",
            x=axis.x(begin_s),
            width=axis.x(end_s) - axis.x(begin_s),
            y=y(bottom + one.memory_bytes),
            height=y(0) - y(one.memory_bytes),
        )
        for one, begin_s, end_s, bottom in stacked(holdings, axis.pixel_s)
    ]


def stacked(holdings: Sequence[HeldPart], least_s: float) -> list[tuple[HeldPart, float, float, int]]:
    """Put leases one on top of the other, as they were held.

    Returns pieces without overlaps: a lease, from when to when, and above how many bytes. Of the moments in
    ``least_s`` seconds the last counts: one lease follows another within milliseconds.
    """
    slots = pack([(one.begin_s, one.end_s) for one in holdings])
    todo = sorted(zip(slots, holdings, strict=True), key=lambda one: one[1].begin_s, reverse=True)
    stack: list[tuple[int, HeldPart]] = []
    begun: dict[int, tuple[float, int]] = {}  # the last piece of each lease: since when, above how much
    found = []
    for at in {int(at / least_s): at for at in leased_steps(holdings)[0]}.values():
        while todo and todo[-1][1].begin_s <= at:
            stack.append(todo.pop())
        bottom = 0
        for _, one in sorted(stack, key=lambda one: one[0]):
            since, before = begun.get(id(one), (at, bottom))
            is_over = one.end_s <= at
            if is_over or before != bottom:
                found += [(one, since, at, before)] if since < at else []
                since = at
            begun[id(one)] = since, bottom
            bottom += 0 if is_over else one.memory_bytes
        stack = [(slot, one) for slot, one in stack if one.end_s > at]
    return found


def workers_picture(history: History, axis: TimeAxis, tries: Sequence[CallTry]) -> Picture | None:
    """Return which call had a worker when, by GPU, and how many waited; None where there was no call."""
    if not tries:
        return None
    groups = _groups(history, [one for one in tries if one.worker])
    panels = []
    if waits := [part for one in tries for part in one.parts if part.phase == WAITING]:
        panels.append(_counts_panel("waiting for a lease", axis, {WAITING: waits}))
    without = [one for one in tries if not one.worker and one.has_failed]
    for panel in panels:
        panel.marks = [Mark("failed", axis.x(one.end_s), panel.height - 6) for one in without]
    if len(tries) > MOST_BARS:
        caption = "How many calls were in which phase."
        for title, own in groups.items():
            parts = {
                phase: [part for one in own for part in one.parts if part.phase == phase]
                for phase in (RUNNING, STARTING, EXITING)
            }
            panels.append(_counts_panel(title, axis, parts))
    else:
        caption = (
            "Each bar is a call: the start of its worker, the task, and the worker's exit. Point at one for "
            "more."
        )
        lanes = {title: lanes_of(own) for title, own in groups.items()}
        count = sum(1 + max(own, default=0) for own in lanes.values())
        lane_height = min(_LANE, max(_LEAST_LANE, _LANES_HEIGHT / max(1, count)))
        for title, own in groups.items():
            panels.append(_lanes_panel(title, axis, own, lanes[title], lane_height))
    kinds = (*PHASES, "failed", OUT_OF_MEMORY, HOST_LOST, "no end")
    return Picture("Workers", caption, panels, {kind: kind for kind in kinds})


def _groups(history: History, tries: Sequence[CallTry]) -> dict[str, list[CallTry]]:
    """Return calls that have a worker, by the name of their GPU, or of the CPU of a host."""
    gpus = history.gpus_of_run
    found: dict[str, list[CallTry]] = {gpu_name(gpu, gpus): [] for gpu in gpus}
    names = {gpu.uuid: gpu_name(gpu, gpus) for gpu in gpus}
    on_cpu = [one for one in tries if not any(uuid in names for uuid in one.gpus)]
    hosts = {one.whose.host for one in on_cpu}
    for one in tries:
        for uuid in one.gpus:
            if uuid in names:
                found[names[uuid]].append(one)
    for one in on_cpu:
        found.setdefault(f"CPU{_on_host(one.whose.host, hosts)}", []).append(one)
    return {name: own for name, own in found.items() if own}


def _counts_panel(title: str, axis: TimeAxis, parts: Mapping[str, Sequence[CallPhase]]) -> Panel:
    """Return how many calls were in some phases, one on top of the other."""
    panel = Panel(title, _COUNT_HEIGHT, "calls")
    means = {
        phase: np.array(axis.means((part.begin_s, part.end_s, 1) for part in own))
        for phase, own in parts.items()
        if own
    }
    top = max(float(sum(means.values(), np.zeros(1)).max()), 1.0) * 1.04
    whole = [tick for tick in ticks(top, 3) if tick == int(tick)]
    panel.ticks = [(panel.height * (1 - tick / top), f"{tick:g}") for tick in whole]
    floor = np.full(1, panel.height)
    for phase, own in means.items():
        above = floor - panel.height * own / top
        floor = np.broadcast_to(floor, above.shape)
        panel.bars.append(Bar(phase, path=_area(floor.tolist(), above.tolist())))
        floor = above
    return panel


def _lanes_panel(
    title: str, axis: TimeAxis, tries: Sequence[CallTry], lanes: Sequence[int], lane_height: float
) -> Panel:
    """Return calls as bars in lanes."""
    panel = Panel(title, (1 + max(lanes)) * lane_height)
    gap = 1.0 if lane_height >= 6 else 0.0
    for one, lane in zip(tries, lanes, strict=True):
        y, label, client = lane * lane_height, _told(one), printable(one.whose.client)
        parts = [part for part in one.parts if part.phase != WAITING]
        widest = max(parts, key=lambda part: (part.phase == RUNNING, part.seconds), default=None)
        for part in parts:
            x, width = axis.x(part.begin_s), axis.x(part.end_s) - axis.x(part.begin_s)
            has_room = part is widest and lane_height >= _LANE and width > _LETTER * len(client) + 6
            name = client if has_room else ""
            panel.bars.append(Bar(part.phase, label, x, y + gap, width, lane_height - 2 * gap, name=name))
        if kind := _end_of(one):
            panel.marks.append(Mark(kind, axis.x(one.end_s), y + lane_height / 2))
    return panel


def _end_of(one: CallTry) -> str:
    """Name how a call has ended that has not ended well."""
    if one.outcome in (OUT_OF_MEMORY, HOST_LOST):
        return one.outcome
    if one.has_failed:
        return "failed"
    return "" if one.outcome else "no end"


def _told(one: CallTry) -> str:
    """Say all that is known of a call, in one line."""
    whose = {"task": one.whose.task, "client": one.whose.client}
    of_round = "" if one.whose.round is None else f" in round {one.whose.round}"
    parts = ", ".join(f"{part.phase} {duration_text(part.seconds)}" for part in one.parts)
    return f"{call_label(whose)}{of_round}: {parts}; {one.outcome or 'no end'}"


def lanes_of(tries: Sequence[CallTry]) -> list[int]:
    """Return a lane, from 0, for each call that has a worker: no two workers overlap in one lane.

    All calls that one worker handles lie in one lane.
    """
    spans: dict[int, tuple[float, float]] = {}
    processes = [one.worker.process if one.worker else 0 for one in tries]
    for process, one in zip(processes, tries, strict=True):
        begin_s = next((part.begin_s for part in one.parts if part.phase != WAITING), one.end_s)
        begun_s, ended_s = spans.get(process, (begin_s, one.end_s))
        spans[process] = min(begun_s, begin_s), max(ended_s, one.end_s)
    lanes = dict(zip(spans, pack(list(spans.values())), strict=True))
    return [lanes[process] for process in processes]


def pack(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return a lane, from 0, for each span (begin, end): no two overlap in one lane, and lanes are few.

    A span may begin where another ends.
    """
    lanes = [0] * len(spans)
    busy: list[tuple[float, int]] = []  # until when, and the lane
    free: list[int] = []
    for place in sorted(range(len(spans)), key=spans.__getitem__):
        begin, end = spans[place]
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lanes[place] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lanes[place]))
    return lanes


def _area(floor: Sequence[float], tops: Iterable[float]) -> str:
    """Return the path around columns that stand beside each other, each from its floor to its top."""
    edges = [_COLUMN * place for place in range(len(floor) + 1)]
    there = [f"V{top:.1f}H{right}" for top, right in zip(tops, edges[1:], strict=True)]
    back = [f"V{low:.1f}H{left}" for low, left in reversed(list(zip(floor, edges, strict=False)))]
    return f"M0 {floor[0]:.1f}{''.join(there)}{''.join(back)}z"


# Names


def gpu_name(gpu: GPUInfo, others: Sequence[GPUInfo]) -> str:
    """Name a GPU by its number, and its host if there are several.

    It has its UUID as well if another one of its host has this number, as MIG devices do.
    """
    where = _on_host(gpu.host, [one.host for one in others])
    if gpu.index < 0:
        return f"GPU {gpu.uuid}{where}"
    if sum((one.host, one.index) == (gpu.host, gpu.index) for one in others) > 1:
        return f"GPU {gpu.index} ({gpu.uuid[:12]}){where}"
    return f"GPU {gpu.index}{where}"


def _on_host(host: str, others: Iterable[str]) -> str:
    """Say on which host something is: ``" on node7"``; nothing where all are on one."""
    if not host or len(set(others)) == 1:
        return ""
    # Of a long name the domain is least of what is looked for, then the beginning.
    return f" on {host if len(host) <= _HOST_LETTERS else host.partition('.')[0][-_HOST_LETTERS:]}"


def client_name(client: str) -> str:
    """Name a client: ``"client 3"``, ``"server"``."""
    if client == SERVER:
        return SERVER
    return f"client {client[:_MOST_LETTERS]}" if client else "unnamed client"
