"""Pictures of the GPUs: their memory and its leases, how busy and how warm they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flower_gpu.printable import printable
from flower_gpu.watch.history import History
from flower_gpu.watch.report import drawing
from flower_gpu.watch.report.calls import SERVER, RunClock
from flower_gpu.watch.report.drawing import GIB, ClientColours, Numbers, Picture, gpu_name, places, places_of
from flower_gpu.watch.report.totals import HeldPart, bands, leased_steps
from flower_gpu.watch.spans import GPUInfo, GPUSample, OutOfMemory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More are not drawn; the table has all.
MOST_GPUS: Final = 16
MOST_NAMED_CLIENTS: Final = 3 * drawing.COLOURS

_MOST_LETTERS: Final = 40  # of a client's name
_MOST_MOMENTS: Final = 2500  # of leases: more than a picture has columns
_SMALL_BANDS: Final = 1200
_ALL_CLIENTS: Final = drawing.mixed(drawing.SKY, 0.15)


def memory_picture(
    history: History,
    clock: RunClock,
    holdings: Mapping[str, Sequence[HeldPart]],
    colours: ClientColours,
    width_in: float,
) -> Picture | None:
    """Draw how much memory was in use and how much was leased, for each GPU."""
    from matplotlib.ticker import MaxNLocator

    gpus = [gpu for gpu in history.gpus_of_run if history.samples.get(gpu.uuid) or holdings[gpu.uuid]]
    if not gpus:
        return None
    shown = gpus[:MOST_GPUS]
    clients = {one.client for gpu in shown for one in holdings[gpu.uuid]}
    is_named = len(clients) <= MOST_NAMED_CLIENTS

    def draw(axes: Axes, gpu: GPUInfo, samples: Sequence[GPUSample]) -> dict[str, Any]:
        _draw_leases(axes, clock, holdings[gpu.uuid], colours, is_named)
        handles = _draw_limits(axes, gpu, samples) | _draw_used(axes, clock, samples)
        handles |= _draw_out_of_memory(axes, clock, history.out_of_memory, gpu)
        axes.set_ylim(0, _top(gpu, holdings[gpu.uuid], samples))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 4, 8, 10]))
        return handles

    figure, handles = _panels(history, clock, gpus, (width_in, 2.1), "GiB", draw)
    legend = _lease_handles(sorted(clients, key=colours.order.__getitem__), colours, is_named)
    handles |= legend
    drawing.arrange(figure, handles)
    shared = ""
    if 1 < len(legend) < len(clients):
        server = SERVER in clients  # has a colour of its own
        shared = (
            f" {len(clients) - server} clients share {len(legend) - server} colours: the legend names all."
        )
    return Picture(
        "memory",
        "GPU memory",
        "Coloured: leases, one on top of the other. Line: what the driver says is in use, by anybody."
        + shared
        + _left_out(gpus),
        f"Memory in use and leased over time on {len(shown)} GPUs",
        figure,
    )


def utilization_picture(history: History, clock: RunClock, width_in: float) -> Picture | None:
    """Draw how busy and how warm each GPU was; None where the driver tells neither."""
    gpus = [
        gpu
        for gpu in history.gpus_of_run
        if any(
            sample.utilization_percent is not None or sample.temperature_c is not None
            for sample in history.samples.get(gpu.uuid, ())
        )
    ]
    if not gpus:
        return None
    size = (width_in, 1.5)
    figure, handles = _panels(
        history, clock, gpus, size, "busy (%)", lambda axes, _, samples: _draw_busy(axes, clock, samples)
    )
    drawing.arrange(figure, handles, right_in=0.6)
    return Picture(
        "utilization",
        "GPU utilization",
        "The part of the moments before each look in which the GPU computed something." + _left_out(gpus),
        f"Utilization over time of {min(len(gpus), MOST_GPUS)} GPUs",
        figure,
    )


def _panels(
    history: History,
    clock: RunClock,
    gpus: Sequence[GPUInfo],
    size_in: tuple[float, float],
    y_label: str,
    draw: Callable[[Axes, GPUInfo, Sequence[GPUSample]], dict[str, Any]],
) -> tuple[Figure, dict[str, Any]]:
    """Draw the first GPUs, one below the other over the same time; return what a legend is made of, too."""
    shown = gpus[:MOST_GPUS]
    figure = drawing.new_figure(size_in[0], len(shown) * size_in[1])
    handles: dict[str, Any] = {}
    for gpu, axes in zip(shown, figure.subplots(len(shown), 1, squeeze=False)[:, 0], strict=True):
        title = ", ".join(filter(None, (gpu_name(gpu, gpus), printable(gpu.name))))
        drawing.dress(axes, y_label=y_label, title=title)
        handles |= draw(axes, gpu, history.samples.get(gpu.uuid, []))
        drawing.time_axis(axes, clock, has_label=gpu is shown[-1])
    return figure, handles


def _left_out(gpus: Sequence[GPUInfo]) -> str:
    return f" The first {MOST_GPUS} of {len(gpus)} GPUs." if len(gpus) > MOST_GPUS else ""


def _top(gpu: GPUInfo, holdings: Sequence[HeldPart], samples: Sequence[GPUSample]) -> float:
    known = [gpu.total_bytes, gpu.capacity_bytes, *(sample.used_bytes for sample in samples)]
    known += leased_steps(holdings)[1]
    return 1.04 * max((nbytes for nbytes in known if nbytes), default=GIB) / GIB


def _draw_leases(
    axes: Axes, clock: RunClock, holdings: Sequence[HeldPart], colours: ClientColours, is_named: bool
) -> None:
    """Draw leases as a stack."""
    # Few clients have a place in the stack each; of many, the first to come is at the bottom.
    pieces = bands(holdings, colours.order.__getitem__ if is_named else lambda _: 0, _MOST_MOMENTS)
    if not pieces:
        return
    is_small = len(pieces) <= _SMALL_BANDS
    seconds = np.array([(one.begin_s, one.end_s) for one in pieces])
    nbytes = np.array([(one.bottom_bytes, one.top_bytes) for one in pieces], dtype=float)
    drawing.draw_bars(
        axes,
        *places(clock, seconds).T,
        *(nbytes / GIB).T,
        facecolors=[colours[one.client] if is_named else _ALL_CLIENTS for one in pieces],
        edgecolors=drawing.PAPER if is_small else "none",
        linewidths=0.5,
        rasterized=not is_small,
    )
    if is_small:
        at, sums = leased_steps(holdings)
        gib = np.array([0, *sums], dtype=float) / GIB
        axes.step(places(clock, [at[0], *at]), gib, where="post", color=drawing.GREY, linewidth=0.8, zorder=3)


def _draw_limits(axes: Axes, gpu: GPUInfo, samples: Sequence[GPUSample]) -> dict[str, Any]:
    start = next((sample.used_bytes for sample in samples if sample.used_bytes is not None), None)
    limits = {
        "limit of leases": (gpu.capacity_bytes or None, drawing.VERMILION, "--"),
        "in use before": (start, drawing.INK, ":"),
    }
    return {
        label: axes.axhline(nbytes / GIB, color=colour, linewidth=1.2, linestyle=line, zorder=4)
        for label, (nbytes, colour, line) in limits.items()
        if nbytes is not None
    }


def _draw_used(axes: Axes, clock: RunClock, samples: Sequence[GPUSample]) -> dict[str, Any]:
    from matplotlib import patheffects

    at, used = _line_of(clock, samples, "used_bytes")
    if np.isnan(used).all():
        return {}
    (line,) = axes.plot(at, used / GIB, color=drawing.INK, linewidth=1.3, zorder=5)
    # Seen on dark colours as well.
    line.set_path_effects([patheffects.Stroke(linewidth=2.8, foreground=drawing.PAPER), patheffects.Normal()])
    return {"in use": line}


def _line_of(clock: RunClock, samples: Sequence[GPUSample], name: str) -> tuple[Numbers, Numbers]:
    """Return a figure of the driver over time, with gaps where it does not tell."""
    at = places_of(clock, (sample.time for sample in samples))
    return drawing.thinned(at, drawing.known_or_nan(getattr(sample, name) for sample in samples))


def _draw_out_of_memory(
    axes: Axes, clock: RunClock, events: Sequence[OutOfMemory], gpu: GPUInfo
) -> dict[str, Any]:
    at = places_of(clock, (event.time for event in events if event.uuid == gpu.uuid))
    if not len(at):
        return {}
    heights = np.ones(len(at))
    where = axes.get_xaxis_transform()
    marks = drawing.draw_marks(axes, at, heights, "v", drawing.ORANGE, 40, transform=where)
    return {"out of memory": marks}


def _lease_handles(clients: Sequence[str], colours: ClientColours, is_named: bool) -> dict[str, Any]:
    from matplotlib.patches import Patch

    if not is_named:
        return {f"leases of {len(clients):,} clients": Patch(facecolor=_ALL_CLIENTS)}
    alike: dict[str, list[str]] = {}
    for client in clients:
        alike.setdefault(colours[client], []).append(client)
    return {_client_names(own): Patch(facecolor=colour) for colour, own in alike.items()}


def _draw_busy(axes: Axes, clock: RunClock, samples: Sequence[GPUSample]) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    axes.set_ylim(0, 103)
    at, percent = _line_of(clock, samples, "utilization_percent")
    if not np.isnan(percent).all():
        look = {"color": drawing.BLUE, "linewidth": 1}
        handles["utilization"] = drawing.draw_steps(axes, at, percent, "pre", drawing.SKY, **look)
    at, celsius = _line_of(clock, samples, "temperature_c")
    if not np.isnan(celsius).all():
        right, colour = axes.twinx(), drawing.VERMILION
        (handles["temperature"],) = right.plot(at, celsius, color=colour, linewidth=1.1)
        right.set_ylim(0, max(103.0, float(np.nanmax(celsius)) * 1.03))
        right.set_ylabel("°C", fontsize=drawing.TEXT_PT, color=colour)
        right.tick_params(labelsize=drawing.TEXT_PT - 1, colors=colour)
        right.spines["top"].set_visible(False)
    return handles


def _client_names(clients: Sequence[str]) -> str:
    """Name clients of one colour: ``"client 3"``, ``"client 3, 17"``, ``"server"``."""
    if clients[0] == SERVER:
        return SERVER
    names = ", ".join(printable(client)[:_MOST_LETTERS] for client in clients if client)
    return f"client {names}" if names else "unnamed client"
