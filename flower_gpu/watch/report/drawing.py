"""What all pictures of a report have in common: colours, axes, lanes of bars, steps, marks, legends, images.

The colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which people who are colour-blind
can tell apart. Ink, grey, lines and paper are other colours where the reader has chosen a dark mode.
Matplotlib is used through its objects: pyplot's state is the program's.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flower_gpu.printable import printable
from flower_gpu.watch.report.calls import SERVER, RunClock, client_key
from flower_gpu.watch.spans import GPUInfo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILION, YELLOW = "#56B4E9", "#D55E00", "#F0E442"
INK, GREY, RULE, PAPER = "#222222", "#777777", "#dddddd", "#ffffff"

#: Each picture is drawn for two widths, with text of the same size: for wide screens and for telephones.
WIDE_IN, NARROW_IN = 10.0, 3.75
TEXT_PT: Final = 9.0
GIB: Final = 2**30
DENSE_DPI: Final = 130  # of what takes less room in pixels than in lines
_LINE_IN, LETTER_IN = 0.12, 0.07  # of text
_HOST_LETTERS: Final = 20

_PALETTE: Final = (ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE)
#: Clients that each can have a colour of their own.
COLOURS: Final = 2 * len(_PALETTE)
_SERVER_COLOUR: Final = "#999999"
_DARK: Final = {INK: "#e6e9ed", GREY: "#9aa4af", RULE: "#363d46", PAPER: "#14181d"}
_NAMES: Final = {colour: f"--c{number}" for number, colour in enumerate(_DARK)}
_STYLE: Final = (
    "text{font-family:system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}"
    f":root{{{';'.join(f'{name}:{colour}' for colour, name in _NAMES.items())}}}"
    "@media screen and (prefers-color-scheme:dark)"
    f"{{:root{{{';'.join(f'{name}:{_DARK[colour]}' for colour, name in _NAMES.items())}}}}}"
)
#: Matplotlib's settings: ink, letters instead of outlines of letters, and always the same names in a file.
LOOK: Final[dict[Any, Any]] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "figure.facecolor": PAPER,  # a browser that does not tell pictures of dark mode shows light ones
    "axes.facecolor": "none",
    "axes.formatter.useoffset": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "flower-gpu",
}
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
    """A figure of a report, for one width."""

    name: str  # of its file, without a suffix
    title: str
    caption: str
    alt: str  # stands in its place where no images are shown
    figure: Figure

    @property
    def png(self) -> bytes:
        """The figure as a PNG, for light pages."""
        return self._saved("png")

    @property
    def data_uri(self) -> str:
        """The figure as an image that stands in a page itself, and is dark where the reader wants that."""
        unknown = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        text = re.sub(r"\s+", " ", self._saved("svg", metadata=unknown).decode())
        text = re.sub(r"<[^>]*>", _shortened, text[text.index("<svg") :])
        text = text.replace("<style>", f"<style>{_STYLE}", 1).replace("> <", "><")
        return f"data:image/svg+xml;base64,{base64.b64encode(text.encode()).decode()}"

    def _saved(self, kind: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format=kind, dpi=DENSE_DPI, **options)
        return buffer.getvalue()


def _shortened(tag: re.Match[str]) -> str:
    """Write a tag of an SVG with colours by name, and without what no browser needs."""
    text = re.sub(r'( font-family: [^;"]*;| type="text/css"|(?<=<g) id="[^"]*")', "", tag[0])
    text = re.sub(r"(\.\d\d)\d+", r"\1", text)
    return re.sub("#[0-9a-f]{6}\\b", lambda colour: _variable(colour[0]), text)


def _variable(colour: str) -> str:
    return f"var({_NAMES[colour]})" if colour in _NAMES else colour


def time_axis(axes: Axes, clock: RunClock, *, has_label: bool = True) -> None:
    """Set up the x axis: the time of the run, its beginning without calls, and where it was interrupted."""
    unit, unit_s = clock.unit
    axes.set_xlim(0, clock.length_s / unit_s)
    width_in = clock.work_s / inch_s(axes, clock)
    if width_in > 2 * _LINE_IN:
        axes.axvspan(0, clock.work_s / unit_s, color=GREY, alpha=0.15, linewidth=0)
        axes.text(
            clock.work_s / unit_s / 2,
            0.5,
            "starting up",
            transform=axes.get_xaxis_transform(),
            rotation=0 if width_in > 1.2 else 90,
            fontsize=TEXT_PT - 1,
            ha="center",
            va="center",
        )
    for at in clock.pauses_s:
        axes.axvline(at / unit_s, color=GREY, linewidth=0.8, linestyle=(0, (2, 3)), zorder=6)
    if has_label:
        axes.set_xlabel(f"time since the start ({unit})", fontsize=TEXT_PT)
    else:
        axes.tick_params(labelbottom=False)


def inch_s(axes: Axes, clock: RunClock) -> float:
    """Return about how many seconds an inch of the axis of time has."""
    figure: Any = axes.get_figure()
    return clock.length_s / (float(figure.get_figwidth()) - 0.75)


def places(clock: RunClock, seconds: Sequence[float] | Numbers) -> Numbers:
    """Return where on the axis of time some seconds of the run lie."""
    return np.asarray(seconds, dtype=float) / clock.unit[1]


def places_of(clock: RunClock, times: Iterable[float]) -> Numbers:
    """Return where on the axis of time some moments (Unix seconds) lie."""
    return places(clock, [clock.seconds(time) for time in times])


class ClientColours:
    """A colour for each client, the same in all pictures of a report.

    From the eighth client on colours come again, darker; after ``COLOURS`` clients as they were.
    """

    def __init__(self, clients: Iterable[str]) -> None:
        self.order = {client: place for place, client in enumerate(sorted(set(clients), key=client_key))}

    def __getitem__(self, client: str) -> str:
        if client == SERVER:
            return _SERVER_COLOUR
        turn, place = divmod(self.order[client] - (SERVER in self.order), len(_PALETTE))
        return mixed(_PALETTE[place], 0.35, into=0) if turn % 2 else mixed(_PALETTE[place], 0.15)


def mixed(colour: str, share: float, into: int = 255) -> str:
    """Mix a colour with white, or another shade of grey."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (into - part) * share):02x}" for part in parts)


def gpu_name(gpu: GPUInfo, others: Sequence[GPUInfo]) -> str:
    """Name a GPU by its number, and its host if there are several.

    It has its UUID as well if another one of its host has this number, as MIG devices do.
    """
    where = on_host(gpu.host, [one.host for one in others])
    if gpu.index < 0:
        return f"GPU {printable(gpu.uuid)}{where}"
    if sum((one.host, one.index) == (gpu.host, gpu.index) for one in others) > 1:
        return f"GPU {gpu.index} ({printable(gpu.uuid)[:12]}){where}"
    return f"GPU {gpu.index}{where}"


def on_host(host: str, others: Iterable[str]) -> str:
    """Say on which host something is: ``" on node7"``; nothing where all are on one."""
    if not host or len(set(others)) == 1:
        return ""
    name = printable(host)
    # Of a long name the domain is least of what is looked for, then the beginning.
    return f" on {name if len(name) <= _HOST_LETTERS else name.partition('.')[0][-_HOST_LETTERS:]}"


def task_name(task: str) -> str:
    """Name messages or metrics of one kind: ``"clients, fit"``."""
    return _WHOSE.get(task, printable(task))


def counted(number: int, noun: str) -> str:
    """Write a number and what is counted: ``"1 client"``, ``"3 clients"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def new_figure(width_in: float, height_in: float) -> Figure:
    """Make an empty figure. It has no room for names of the axis of x and for a legend: see arrange."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in))


def dress(axes: Axes, *, y_label: str = "", title: str = "") -> None:
    """Give axes the look of all others."""
    axes.tick_params(labelsize=TEXT_PT - 1)
    axes.grid(visible=True, axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if y_label:
        axes.set_ylabel(y_label, fontsize=TEXT_PT)
    if title:
        # Names may have dollar signs in them, and are no formulas.
        axes.set_title(title, fontsize=TEXT_PT, loc="left", parse_math=False)


def arrange(
    figure: Figure,
    handles: dict[str, Any],
    *,
    left_in: float = 0.6,
    right_in: float = 0.15,
    top_in: float = 0.25,
    gaps_in: tuple[float, float] = (0.0, 0.3),
) -> None:
    """Give all axes their place, and put a legend below them, for which the figure becomes higher.

    ``gaps_in`` are between columns and between rows. Matplotlib's own layouts take as long as the drawing.
    """
    width_in, axes_in = figure.get_size_inches()
    columns = int(width_in / (0.55 + LETTER_IN * max(map(len, handles), default=0))) or 1
    bottom_in = 0.5 + 1.5 * _LINE_IN * -(-len(handles) // columns)
    height_in = axes_in + bottom_in
    figure.set_size_inches(width_in, height_in)
    grid: Any = figure.axes[0].get_gridspec()
    inner = (width_in - left_in - right_in, axes_in - top_in)
    gaps = [
        gap * number / max(1e-3, whole - gap * (number - 1))  # matplotlib counts them in widths of axes
        for gap, number, whole in zip(gaps_in, (grid.ncols, grid.nrows), inner, strict=True)
    ]
    figure.subplots_adjust(
        left_in / width_in, bottom_in / height_in, 1 - right_in / width_in, 1 - top_in / height_in, *gaps
    )
    if not handles:
        return
    legend = figure.legend(
        list(handles.values()),
        list(handles),
        loc="lower center",
        ncols=min(columns, len(handles)),
        fontsize=TEXT_PT - 1,
        frameon=False,
        borderpad=0,
        handlelength=1.6,
        columnspacing=1.4,
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
    axes.fill_between(at, values, step=where, color=fill, linewidth=0, alpha=0.4)
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
