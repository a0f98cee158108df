"""Pictures of the GPUs: their memory and its leases, how busy and how warm they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flower_gpu.monitor.report import drawing
from flower_gpu.monitor.report.clock import Clock
from flower_gpu.monitor.report.drawing import GIB, ClientColours, Picture, TimeAxis
from flower_gpu.monitor.report.holdings import Holding, bands, leased_steps
from flower_gpu.monitor.report.names import client_name, gpu_name
from flower_gpu.monitor.report.recorded import RunHistory
from flower_gpu.monitor.spans import GPUInfo, GPUSample, OutOfMemory
from flower_gpu.printable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More are not drawn; the table has all.
MOST_GPUS: Final = 16
MOST_NAMED_CLIENTS: Final = 12

_MOST_MOMENTS: Final = 2500  # of leases: more than a picture has columns
_SMALL_BANDS: Final = 1200
_PALE: Final = 0.5  # white in the colours of many clients, so that lines are seen on them
_PANEL_IN: Final = 2.1


def memory_picture(
    history: RunHistory, clock: Clock, holdings: Mapping[str, Sequence[Holding]], colours: ClientColours
) -> Picture | None:
    """Draw how much memory was in use and how much was leased, for each GPU."""
    gpus = [gpu for gpu in history.gpus_of_run() if history.samples.get(gpu.uuid) or holdings[gpu.uuid]]
    if not gpus:
        return None
    shown = gpus[:MOST_GPUS]
    figure, panels = _panels(len(shown), _PANEL_IN)
    axis = TimeAxis.of(clock)
    clients = sorted(
        {one.client for gpu in shown for one in holdings[gpu.uuid]}, key=colours.order.__getitem__
    )
    is_named = len(clients) <= MOST_NAMED_CLIENTS
    count = 0
    handles: dict[str, Any] = {}
    for place, (gpu, axes) in enumerate(zip(shown, panels, strict=True)):
        drawing.dress(axes, y_label="GiB", title=_title(gpu, gpus))
        count += _draw_leases(axes, axis, holdings[gpu.uuid], colours, is_named)
        handles |= _draw_limits(axes, gpu, history.samples.get(gpu.uuid, []))
        handles |= _draw_used(axes, axis, clock, history.samples.get(gpu.uuid, []))
        handles |= _draw_out_of_memory(axes, axis, clock, history.out_of_memory, gpu)
        axis.apply(axes, has_label=place == len(shown) - 1)
        axes.set_ylim(0, _top(gpu, holdings[gpu.uuid], history.samples.get(gpu.uuid, [])))
    handles |= _lease_handles(clients, colours, is_named)
    drawing.legend_below(figure, list(handles.values()), list(handles))
    return Picture(
        "memory",
        "GPU memory",
        "Coloured: leases, one on top of the other. Line: what the driver says is in use, by anybody."
        + _left_out(gpus),
        f"Memory in use and leased over time on {len(shown)} GPUs",
        figure,
        count > _SMALL_BANDS,
    )


def utilization_picture(history: RunHistory, clock: Clock) -> Picture | None:
    """Draw how busy and how warm each GPU was; None where the driver tells neither."""
    told = [
        gpu
        for gpu in history.gpus_of_run()
        if any(
            sample.utilization_percent is not None or sample.temperature_c is not None
            for sample in history.samples.get(gpu.uuid, ())
        )
    ]
    if not told:
        return None
    shown = told[:MOST_GPUS]
    figure, panels = _panels(len(shown), 1.5)
    axis = TimeAxis.of(clock)
    handles: dict[str, Any] = {}
    for place, (gpu, axes) in enumerate(zip(shown, panels, strict=True)):
        drawing.dress(axes, y_label="busy (%)", title=_title(gpu, told))
        handles |= _draw_busy(axes, axis, clock, history.samples[gpu.uuid])
        axis.apply(axes, has_label=place == len(shown) - 1)
    drawing.legend_below(figure, list(handles.values()), list(handles))
    return Picture(
        "utilization",
        "GPU utilization",
        "The part of the moments before each look in which the GPU computed something." + _left_out(told),
        f"Utilization over time of {len(shown)} GPUs",
        figure,
        is_dense=False,
    )


def _panels(count: int, height_in: float) -> tuple[Figure, list[Axes]]:
    figure = drawing.new_figure(count * height_in + 0.9)
    return figure, list(figure.subplots(count, 1, squeeze=False)[:, 0])


def _title(gpu: GPUInfo, gpus: list[GPUInfo]) -> str:
    return ", ".join(filter(None, (gpu_name(gpu, gpus), printable(gpu.name))))


def _left_out(gpus: Sequence[GPUInfo]) -> str:
    return f" The first {MOST_GPUS} of {len(gpus)} GPUs." if len(gpus) > MOST_GPUS else ""


def _top(gpu: GPUInfo, holdings: Sequence[Holding], samples: Sequence[GPUSample]) -> float:
    known = [gpu.total_bytes, gpu.capacity_bytes, *(sample.used_bytes for sample in samples)]
    known += leased_steps(holdings)[1]
    return 1.04 * max((nbytes for nbytes in known if nbytes), default=GIB) / GIB


def _draw_leases(
    axes: Axes, axis: TimeAxis, holdings: Sequence[Holding], colours: ClientColours, is_named: bool
) -> int:
    """Draw leases as a stack, and return of how many pieces it is."""
    from matplotlib.collections import PolyCollection

    # Of few clients each has its place in the stack; else who came first is at the bottom.
    pieces = bands(holdings, colours.order.__getitem__ if is_named else lambda _: 0, _MOST_MOMENTS)
    if not pieces:
        return 0
    begin, end = (axis.places([getattr(one, name) for one in pieces]) for name in ("begin_s", "end_s"))
    bottom, top = (
        np.array([getattr(one, name) for one in pieces], dtype=float) / GIB
        for name in ("bottom_bytes", "top_bytes")
    )
    axes.add_collection(
        PolyCollection(
            drawing.rectangles(begin, end, bottom, top),
            facecolors=[drawing.mixed(colours[one.client], 0 if is_named else _PALE) for one in pieces],
            edgecolors="white",
            linewidths=0.5 if len(pieces) <= _SMALL_BANDS else 0.1,
            zorder=2,
        ),
        autolim=False,
    )
    if len(pieces) > _SMALL_BANDS:
        return len(pieces)
    seconds, sums = leased_steps(holdings)
    gib = np.array([0, *sums], dtype=float) / GIB
    at = axis.places([seconds[0], *seconds])
    axes.step(at, gib, where="post", color=drawing.GREY, linewidth=0.8, zorder=3)
    return len(pieces)


def _draw_limits(axes: Axes, gpu: GPUInfo, samples: Sequence[GPUSample]) -> dict[str, Any]:
    handles = {}
    if gpu.capacity_bytes:
        handles["what leases can have"] = axes.axhline(
            gpu.capacity_bytes / GIB, color=drawing.VERMILION, linewidth=1.2, linestyle="--", zorder=4
        )
    start = next((sample.used_bytes for sample in samples if sample.used_bytes is not None), None)
    if start is not None:
        handles["in use at the start"] = axes.axhline(
            start / GIB, color=drawing.INK, linewidth=1.2, linestyle=":", zorder=4
        )
    return handles


def _draw_used(axes: Axes, axis: TimeAxis, clock: Clock, samples: Sequence[GPUSample]) -> dict[str, Any]:
    from matplotlib import patheffects

    if all(sample.used_bytes is None for sample in samples):
        return {}
    seconds, used = drawing.thinned(
        clock.all_seconds([sample.time for sample in samples]),
        drawing.known_or_nan(sample.used_bytes for sample in samples),
    )
    (line,) = axes.plot(axis.places(seconds), used / GIB, color=drawing.INK, linewidth=1.3, zorder=5)
    # Seen on dark colours as well.
    line.set_path_effects([patheffects.Stroke(linewidth=2.8, foreground="white"), patheffects.Normal()])
    return {"in use": line}


def _draw_out_of_memory(
    axes: Axes, axis: TimeAxis, clock: Clock, events: Sequence[OutOfMemory], gpu: GPUInfo
) -> dict[str, Any]:
    times = [event.time for event in events if event.uuid == gpu.uuid]
    if not times:
        return {}
    marks = axes.scatter(
        axis.places(clock.all_seconds(times)),
        [1.0] * len(times),
        transform=axes.get_xaxis_transform(),
        marker="v",
        s=40,
        color=drawing.VERMILION,
        edgecolors=drawing.INK,
        linewidths=0.6,
        clip_on=False,
        zorder=7,
    )
    return {"a call ran out of memory": marks}


def _lease_handles(clients: Sequence[str], colours: ClientColours, is_named: bool) -> dict[str, Any]:
    from matplotlib.patches import Patch

    if is_named:
        return {client_name(client): Patch(facecolor=colours[client]) for client in clients}
    return {f"leases of {len(clients):,} clients": Patch(facecolor=drawing.mixed(drawing.BLUE, _PALE))}


def _draw_busy(axes: Axes, axis: TimeAxis, clock: Clock, samples: Sequence[GPUSample]) -> dict[str, Any]:
    seconds = clock.all_seconds([sample.time for sample in samples])
    busy = drawing.known_or_nan(sample.utilization_percent for sample in samples)
    celsius = drawing.known_or_nan(sample.temperature_c for sample in samples)
    handles: dict[str, Any] = {}
    axes.set_ylim(0, 103)
    if not np.isnan(busy).all():
        at, percent = drawing.thinned(seconds, busy)
        axes.fill_between(axis.places(at), percent, step="pre", color=drawing.mixed(drawing.BLUE, 0.7))
        (handles["utilization"],) = axes.step(
            axis.places(at), percent, where="pre", color=drawing.BLUE, linewidth=1
        )
    if not np.isnan(celsius).all():
        at, degrees = drawing.thinned(seconds, celsius)
        right = axes.twinx()
        (handles["temperature"],) = right.plot(
            axis.places(at), degrees, color=drawing.VERMILION, linewidth=1.1
        )
        right.set_ylim(0, max(103.0, float(np.nanmax(degrees)) * 1.03))
        right.set_ylabel("°C", fontsize=drawing.TEXT_PT, color=drawing.VERMILION)
        right.tick_params(labelsize=drawing.TEXT_PT - 1, colors=drawing.VERMILION)
        right.spines["top"].set_visible(False)
    return handles
