"""Pictures of the GPUs: their memory and its leases, how busy and how warm they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flower_gpu.printable import printable
from flower_gpu.watch.history import History
from flower_gpu.watch.report import drawing
from flower_gpu.watch.report.calls import SERVER, Clock
from flower_gpu.watch.report.drawing import GIB, ClientColours, Numbers, Picture, gpu_name, places, places_of
from flower_gpu.watch.report.totals import Holding, bands, leased_steps
from flower_gpu.watch.spans import GPUInfo, GPUSample, OutOfMemory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More are not drawn; the table has all.
MOST_GPUS: Final = 16
MOST_NAMED_CLIENTS: Final = 12

_MOST_MOMENTS: Final = 2500  # of leases: more than a picture has columns
_SMALL_BANDS: Final = 1200
_PALE: Final = 0.5  # white in the colours of many clients, so that lines are seen on them


def memory_picture(
    history: History, clock: Clock, holdings: Mapping[str, Sequence[Holding]], colours: ClientColours
) -> Picture | None:
    """Draw how much memory was in use and how much was leased, for each GPU."""
    gpus = [gpu for gpu in history.gpus_of_run if history.samples.get(gpu.uuid) or holdings[gpu.uuid]]
    if not gpus:
        return None
    shown = gpus[:MOST_GPUS]
    clients = {one.client for gpu in shown for one in holdings[gpu.uuid]}
    is_named = len(clients) <= MOST_NAMED_CLIENTS
    pieces: list[int] = []

    def draw(axes: Axes, gpu: GPUInfo, samples: Sequence[GPUSample]) -> dict[str, Any]:
        pieces.append(_draw_leases(axes, clock, holdings[gpu.uuid], colours, is_named))
        handles = _draw_limits(axes, gpu, samples) | _draw_used(axes, clock, samples)
        handles |= _draw_out_of_memory(axes, clock, history.out_of_memory, gpu)
        axes.set_ylim(0, _top(gpu, holdings[gpu.uuid], samples))
        return handles

    figure, handles = _panels(history, clock, gpus, 2.1, "GiB", draw)
    handles |= _lease_handles(sorted(clients, key=colours.order.__getitem__), colours, is_named)
    drawing.legend_below(figure, handles)
    return Picture(
        "memory",
        "GPU memory",
        "Coloured: leases, one on top of the other. Line: what the driver says is in use, by anybody."
        + _left_out(gpus),
        f"Memory in use and leased over time on {len(shown)} GPUs",
        figure,
        sum(pieces) > _SMALL_BANDS,
    )


def utilization_picture(history: History, clock: Clock) -> Picture | None:
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
    figure, handles = _panels(
        history, clock, gpus, 1.5, "busy (%)", lambda axes, _, samples: _draw_busy(axes, clock, samples)
    )
    drawing.legend_below(figure, handles)
    return Picture(
        "utilization",
        "GPU utilization",
        "The part of the moments before each look in which the GPU computed something." + _left_out(gpus),
        f"Utilization over time of {min(len(gpus), MOST_GPUS)} GPUs",
        figure,
        is_dense=False,
    )


def _panels(
    history: History,
    clock: Clock,
    gpus: Sequence[GPUInfo],
    height_in: float,
    y_label: str,
    draw: Callable[[Axes, GPUInfo, Sequence[GPUSample]], dict[str, Any]],
) -> tuple[Figure, dict[str, Any]]:
    """Draw the first GPUs, one below the other over the same time; return what a legend is made of, too."""
    shown = gpus[:MOST_GPUS]
    figure = drawing.new_figure(len(shown) * height_in + 0.9)
    handles: dict[str, Any] = {}
    for gpu, axes in zip(shown, figure.subplots(len(shown), 1, squeeze=False)[:, 0], strict=True):
        title = ", ".join(filter(None, (gpu_name(gpu, gpus), printable(gpu.name))))
        drawing.dress(axes, y_label=y_label, title=title)
        handles |= draw(axes, gpu, history.samples.get(gpu.uuid, []))
        drawing.time_axis(axes, clock, has_label=gpu is shown[-1])
    return figure, handles


def _left_out(gpus: Sequence[GPUInfo]) -> str:
    return f" The first {MOST_GPUS} of {len(gpus)} GPUs." if len(gpus) > MOST_GPUS else ""


def _top(gpu: GPUInfo, holdings: Sequence[Holding], samples: Sequence[GPUSample]) -> float:
    known = [gpu.total_bytes, gpu.capacity_bytes, *(sample.used_bytes for sample in samples)]
    known += leased_steps(holdings)[1]
    return 1.04 * max((nbytes for nbytes in known if nbytes), default=GIB) / GIB


def _draw_leases(
    axes: Axes, clock: Clock, holdings: Sequence[Holding], colours: ClientColours, is_named: bool
) -> int:
    """Draw leases as a stack, and return of how many pieces it is."""
    # Few clients have a place in the stack each; of many, the first to come is at the bottom.
    pieces = bands(holdings, colours.order.__getitem__ if is_named else lambda _: 0, _MOST_MOMENTS)
    if not pieces:
        return 0
    seconds = np.array([(one.begin_s, one.end_s) for one in pieces])
    nbytes = np.array([(one.bottom_bytes, one.top_bytes) for one in pieces], dtype=float)
    drawing.draw_bars(
        axes,
        *places(clock, seconds).T,
        *(nbytes / GIB).T,
        facecolors=[drawing.mixed(colours[one.client], 0 if is_named else _PALE) for one in pieces],
        edgecolors="white",
        linewidths=0.5 if len(pieces) <= _SMALL_BANDS else 0.1,
    )
    if len(pieces) <= _SMALL_BANDS:
        at, sums = leased_steps(holdings)
        gib = np.array([0, *sums], dtype=float) / GIB
        axes.step(places(clock, [at[0], *at]), gib, where="post", color=drawing.GREY, linewidth=0.8, zorder=3)
    return len(pieces)


def _draw_limits(axes: Axes, gpu: GPUInfo, samples: Sequence[GPUSample]) -> dict[str, Any]:
    start = next((sample.used_bytes for sample in samples if sample.used_bytes is not None), None)
    limits = {
        "what leases can have": (gpu.capacity_bytes or None, drawing.VERMILION, "--"),
        "in use at the start": (start, drawing.INK, ":"),
    }
    return {
        label: axes.axhline(nbytes / GIB, color=colour, linewidth=1.2, linestyle=line, zorder=4)
        for label, (nbytes, colour, line) in limits.items()
        if nbytes is not None
    }


def _draw_used(axes: Axes, clock: Clock, samples: Sequence[GPUSample]) -> dict[str, Any]:
    from matplotlib import patheffects

    at, used = _line_of(clock, samples, "used_bytes")
    if np.isnan(used).all():
        return {}
    (line,) = axes.plot(at, used / GIB, color=drawing.INK, linewidth=1.3, zorder=5)
    # Seen on dark colours as well.
    line.set_path_effects([patheffects.Stroke(linewidth=2.8, foreground="white"), patheffects.Normal()])
    return {"in use": line}


def _line_of(clock: Clock, samples: Sequence[GPUSample], name: str) -> tuple[Numbers, Numbers]:
    """Return a figure of the driver over time, with gaps where it does not tell."""
    at = places_of(clock, (sample.time for sample in samples))
    return drawing.thinned(at, drawing.known_or_nan(getattr(sample, name) for sample in samples))


def _draw_out_of_memory(
    axes: Axes, clock: Clock, events: Sequence[OutOfMemory], gpu: GPUInfo
) -> dict[str, Any]:
    at = places_of(clock, (event.time for event in events if event.uuid == gpu.uuid))
    if not len(at):
        return {}
    heights = np.ones(len(at))
    where = axes.get_xaxis_transform()
    marks = drawing.draw_marks(axes, at, heights, "v", drawing.VERMILION, 40, transform=where)
    return {"a call ran out of memory": marks}


def _lease_handles(clients: Sequence[str], colours: ClientColours, is_named: bool) -> dict[str, Any]:
    from matplotlib.patches import Patch

    if is_named:
        return {_client_name(client): Patch(facecolor=colours[client]) for client in clients}
    return {f"leases of {len(clients):,} clients": Patch(facecolor=drawing.mixed(drawing.BLUE, _PALE))}


def _draw_busy(axes: Axes, clock: Clock, samples: Sequence[GPUSample]) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    axes.set_ylim(0, 103)
    at, percent = _line_of(clock, samples, "utilization_percent")
    if not np.isnan(percent).all():
        pale = drawing.mixed(drawing.BLUE, 0.7)
        handles["utilization"] = drawing.draw_steps(
            axes, at, percent, "pre", pale, color=drawing.BLUE, linewidth=1
        )
    at, celsius = _line_of(clock, samples, "temperature_c")
    if not np.isnan(celsius).all():
        right, colour = axes.twinx(), drawing.VERMILION
        (handles["temperature"],) = right.plot(at, celsius, color=colour, linewidth=1.1)
        right.set_ylim(0, max(103.0, float(np.nanmax(celsius)) * 1.03))
        right.set_ylabel("°C", fontsize=drawing.TEXT_PT, color=colour)
        right.tick_params(labelsize=drawing.TEXT_PT - 1, colors=colour)
        right.spines["top"].set_visible(False)
    return handles


def _client_name(client: str) -> str:
    """Name a client: ``"client 3"``, ``"server"``."""
    if client == SERVER:
        return client
    return f"client {printable(client)}" if client else "unnamed client"
