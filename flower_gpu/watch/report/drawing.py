"""What all pictures of a report have in common: colours, axes, lanes of bars, steps, marks, legends, images.

The colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which people who are colour-blind
can tell apart. Matplotlib is used through its objects: pyplot's state is the program's.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flower_gpu.printable import printable
from flower_gpu.watch.report.calls import SERVER, Clock, client_key
from flower_gpu.watch.spans import GPUInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, YELLOW = "#56B4E9", "#D55E00", "#F0E442"
INK, GREY = "#222222", "#777777"

WIDTH_IN: Final = 10.0
TEXT_PT: Final = 9.0
GIB: Final = 2**30
DENSE_DPI: Final = 130

_PALETTE: Final = (ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE)
_SERVER_COLOUR: Final = "#999999"
#: Whose metrics they are, by the kind of the messages that they come from.
_WHOSE: Final = {
    "server-evaluate": "server, evaluate",
    "evaluate": "clients, evaluate",
    "train": "clients, train",
    "fit": "clients, fit",
}
_MOST_POINTS: Final = 2000  # of a line: more than its picture has columns

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Picture:
    """A figure of a report."""

    name: str  # of its file, without a suffix
    title: str
    caption: str
    alt: str  # stands in its place where no images are shown
    figure: Figure
    is_dense: bool  # has so much in it that pixels take less room than lines

    @cached_property
    def png(self) -> bytes:
        """The figure as a PNG."""
        return self._saved("png", dpi=DENSE_DPI)

    @property
    def data_uri(self) -> str:
        """The figure as an image that stands in a page itself."""
        kind = "png" if self.is_dense else "svg+xml"
        data = self.png if self.is_dense else self._saved("svg", metadata={"Date": None})
        return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"

    def _saved(self, kind: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format=kind, facecolor="white", **options)
        return buffer.getvalue()


def time_axis(axes: Axes, clock: Clock, *, has_label: bool = True) -> None:
    """Set up the x axis: the time of the run, with marks where it was interrupted."""
    unit, unit_s = clock.unit
    axes.set_xlim(0, clock.length_s / unit_s)
    for at in clock.pauses_s:
        axes.axvline(at / unit_s, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)), zorder=6)
    if has_label:
        axes.set_xlabel(f"time since the start ({unit})", fontsize=TEXT_PT)
    else:
        axes.tick_params(labelbottom=False)


def places(clock: Clock, seconds: Sequence[float] | Numbers) -> Numbers:
    """Return where on the axis of time some seconds of the run lie."""
    return np.asarray(seconds, dtype=float) / clock.unit[1]


def places_of(clock: Clock, times: Iterable[float]) -> Numbers:
    """Return where on the axis of time some moments (Unix seconds) lie."""
    return places(clock, [clock.seconds(time) for time in times])


class ClientColours:
    """A colour for each client, the same in all pictures of a report.

    From the eighth client on colours come again, darker, then as they were.
    """

    def __init__(self, clients: Iterable[str]) -> None:
        self.order = {client: place for place, client in enumerate(sorted(set(clients), key=client_key))}

    def __getitem__(self, client: str) -> str:
        if client == SERVER:
            return _SERVER_COLOUR
        turn, place = divmod(self.order[client] - (SERVER in self.order), len(_PALETTE))
        return mixed(_PALETTE[place], 0.45, into=0) if turn % 2 else mixed(_PALETTE[place], 0.15)


def mixed(colour: str, share: float, into: int = 255) -> str:
    """Mix a colour with white, or another shade of grey."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (into - part) * share):02x}" for part in parts)


def gpu_name(gpu: GPUInfo, others: Sequence[GPUInfo]) -> str:
    """Name a GPU by its number; by its UUID as well if another has this number: MIG devices, other hosts."""
    if gpu.index < 0:
        return f"GPU {printable(gpu.uuid)}"
    if sum(one.index == gpu.index for one in others) > 1:
        return f"GPU {gpu.index} ({printable(gpu.uuid)[:12]})"
    return f"GPU {gpu.index}"


def task_name(task: str) -> str:
    """Name messages or metrics of one kind: ``"clients, fit"``."""
    return _WHOSE.get(task, printable(task))


def counted(number: int, noun: str) -> str:
    """Write a number and what is counted: ``"1 client"``, ``"3 clients"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def new_figure(height_in: float) -> Figure:
    """Make an empty figure."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def dress(axes: Axes, *, y_label: str = "", title: str = "") -> None:
    """Give axes the look of all others."""
    axes.tick_params(labelsize=TEXT_PT - 1)
    axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if y_label:
        axes.set_ylabel(y_label, fontsize=TEXT_PT)
    if title:
        # Names may have dollar signs in them, and are no formulas.
        axes.set_title(title, fontsize=TEXT_PT, loc="left", parse_math=False)


def legend_below(figure: Figure, handles: dict[str, Any], columns: int = 6) -> None:
    """Put a legend below all axes, where it lies on nothing."""
    if not handles:
        return
    legend = figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=min(columns, len(handles)),
        fontsize=TEXT_PT - 1,
        frameon=False,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def draw_bars(axes: Axes, left: Numbers, right: Numbers, bottom: Numbers, top: Numbers, **look: Any) -> None:
    """Draw rectangles as one collection, so that thousands take no longer than a few."""
    from matplotlib.collections import PolyCollection

    corners: Any = np.stack([left, bottom, left, top, right, top, right, bottom], axis=1).reshape(-1, 4, 2)
    axes.add_collection(PolyCollection(corners, zorder=2, **look), autolim=False)


def draw_steps(axes: Axes, at: Numbers, values: Numbers, where: Any, fill: str, **look: Any) -> Any:
    """Draw a line of steps with the area below it, and return the line."""
    axes.fill_between(at, values, step=where, color=fill, linewidth=0)
    (line,) = axes.step(at, values, where=where, **look)
    return line


def draw_marks(
    axes: Axes, at: Numbers, heights: Any, marker: str, colour: str, size: int, **more: Any
) -> Any:
    """Draw marks that are seen on everything, and return them."""
    look: Any = {"edgecolors": INK, "linewidths": 0.6, "clip_on": False, "zorder": 7}
    return axes.scatter(at, heights, marker=marker, s=size, color=colour, **look, **more)


def thinned(seconds: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    """Leave out points of a long line that nobody could see; lowest and highest ones stay."""
    if len(values) <= _MOST_POINTS:
        return seconds, values
    keep: set[int] = {0, len(values) - 1}
    for places in np.array_split(np.arange(len(values)), _MOST_POINTS // 2):
        part = values[places]
        known = places[~np.isnan(part)]
        if len(known) < len(places):  # a gap stays one
            keep.add(int(places[np.isnan(part)][0]))
        if len(known):
            keep |= {int(known[np.argmin(values[known])]), int(known[np.argmax(values[known])])}
    kept = sorted(keep)
    return seconds[kept], values[kept]


def known_or_nan(values: Iterable[float | None]) -> Numbers:
    """Return values as an array, with gaps where they are not known."""
    return np.array([np.nan if value is None else value for value in values], dtype=float)
