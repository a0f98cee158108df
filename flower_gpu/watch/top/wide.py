"""What a wide terminal has: graphs of the last minutes beside GPUs and cores, and curves of runs' metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from flower_gpu.watch.top import tables
from flower_gpu.watch.top.past import CORES, Past, Share, graph
from flower_gpu.watch.top.snapshot import HostRow, RunRow, Snapshot
from flower_gpu.watch.top.tables import duration, joined, text

if TYPE_CHECKING:
    from rich.text import Text

WIDE: Final = 120  # cells of a terminal that has room for graphs
_HIGH: Final = 30  # lines of one
_LEAST, _MOST = 70, 82  # cells beside the graphs
_LEAST_LINES, _MOST_LINES = 2, 4  # of a graph
_CURVE_LINES: Final = 4  # of a run, with the title
_TINY: Final = 1e-9  # a share that is drawn as the lowest dot


def block_lines(snapshot: Snapshot, width: int, height: int | None) -> int:
    """Return how many lines each GPU, and the cores, have with graphs; 0 where there is no room for them."""
    if height is None or width < WIDE or height < _HIGH:
        return 0
    blocks = len(snapshot.gpus) + (snapshot.resources is not None)
    lines = (height * 2 // 5 - 2) // max(1, blocks)
    return min(lines, _MOST_LINES) if lines >= _LEAST_LINES else 0


def lines(snapshot: Snapshot, past: Past, width: int, block: int, *, is_ascii: bool) -> list[Text]:
    """Return GPUs and cores, each in so many lines, and what the bars and graphs mean."""
    left = min(_MOST, max(_LEAST, width // 2))
    edge = " |" if is_ascii else " │"
    cells = (width - left - 2 * len(edge)) // 2
    found: list[Text] = []
    for gpu in snapshot.gpus:
        own = tables.long_lines(gpu, left, is_ascii)
        if block > _LEAST_LINES and not gpu.problem:
            own.append(tables.who_line(gpu, left))
        found += _beside(own, left, block, _graphs(past, gpu.uuid, cells, block, is_ascii), edge)
    if not snapshot.gpus:
        found += tables.gpu_lines(snapshot, width, None, is_ascii=is_ascii)
    if snapshot.resources is not None:
        own = _cores(snapshot.resources, left, is_ascii)
        found += _beside(own, left, block, _graphs(past, CORES, cells, block, is_ascii), edge)
    since = f"for {duration(2 * cells * past.slot_s)}"
    has_cores, has_gpus = snapshot.resources is not None, bool(snapshot.gpus)
    told = "; ".join(["memory"] * has_gpus + ["cores leased"] * has_cores)
    titles = [
        [joined(cells - 1, (0, told, "green"), (1, since, "dim"))],
        [joined(cells - 1, (0, "busy", "cyan"), (1, since, "dim"))],
    ]
    for (title,) in titles:
        title.pad_left(1)
        title.truncate(cells, overflow="ellipsis", pad=True)
    return [*found, *_beside([tables.meanings(is_ascii)], left, 1, titles, edge)]


def curves(runs: Sequence[RunRow], width: int, height: int | None, *, is_ascii: bool) -> list[Text]:
    """Return curves of the metrics of the first runs that have some, two beside each other."""
    shown = [run for run in runs if any(len(points) > 1 for points in run.curves.values())]
    edge = "| " if is_ascii else "│ "
    cells = (width - 2) // 2 - len(edge)
    made: list[Text] = []
    for run in shown[: (height or 0) // 5 // _CURVE_LINES]:
        blocks = [_curve(run.run, *curve, cells, is_ascii) for curve in run.curves.items()]
        for line in zip(*blocks, strict=True):
            made.append(text(("  ", "")))
            for part in line:
                part.truncate(cells, overflow="ellipsis", pad=True)
                made[-1].append(edge, "dim").append_text(part)
    return made


def _curve(
    run: str, name: str, points: Sequence[tuple[int, float]], cells: int, is_ascii: bool
) -> list[Text]:
    """Return a metric by round from its least to its most, over all cells, under what it is."""
    values = [value for _, value in points]
    least, most, dots = min(values), max(values), 2 * cells
    # The halves: a difference of huge values would be no number.
    shares = [max(_TINY, (value / 2 - least / 2) / (most / 2 - least / 2 or 1)) for value in values]
    spread = [shares[dot * len(shares) // dots] for dot in range(dots)]
    told = [
        (1, run, "cyan"),
        (0, f"{name} {values[-1]:.4g}", ""),
        (3, f"rounds {points[0][0]} to {points[-1][0]}", "dim"),
        (2, f"from {least:.4g} to {most:.4g}", "dim"),
    ]
    drawn = graph(spread, _CURVE_LINES - 1, is_ascii=is_ascii)
    return [joined(cells, *told), *(text((line, "green")) for line in drawn)]


def _graphs(past: Past, key: str, cells: int, block: int, is_ascii: bool) -> list[list[Text]]:
    # A line stays free, so that graphs do not touch each other.
    height = block - 1 if block > _LEAST_LINES else block

    def drawn(shares: Sequence[Share], style: str) -> list[Text]:
        return [text((line, style)) for line in graph(shares, height, is_ascii=is_ascii)]

    return [drawn(past.memory(key, 2 * cells), "green"), drawn(past.busy(key, 2 * cells), "cyan")]


def _beside(
    own: Sequence[Text], left: int, block: int, graphs: Sequence[Sequence[Text]], edge: str
) -> list[Text]:
    """Put lines on the left, and graphs on the right of them, all of them of so many lines."""
    made = []
    for number in range(block):
        line = own[number].copy() if number < len(own) else text()
        line.truncate(left, overflow="ellipsis", pad=True)
        for one in graphs:
            if number < len(one):
                line.append(edge, "dim").append_text(one[number])
        made.append(line)
    return made


def _cores(host: HostRow, width: int, is_ascii: bool) -> list[Text]:
    bar = tables.cores_bar(host, width, is_ascii)
    return [joined(width, *tables.cores_fields(host), (1, tables.memory_text(host), "")), bar]
