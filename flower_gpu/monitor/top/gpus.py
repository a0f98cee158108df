"""The GPUs of a snapshot as lines: a bar of memory, and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flower_gpu.monitor.top.lines import Glyphs, Line, joined
from flower_gpu.monitor.top.snapshot import GPURow, Snapshot

_GIB = 2**30
_LONGEST_BAR: Final = 64
_NOTHING: Final = 0.05  # of a cell
_BESIDE: Final = 26  # cells beside a bar, for what is leased


def gpu_lines(snapshot: Snapshot, width: int, most: int | None, glyphs: Glyphs) -> list[Line]:
    """Return the GPUs: two lines each and what the bars mean, or one each where there is no room for that.

    Parameters
    ----------
    snapshot : Snapshot
        What was seen.
    width : int
        Cells of a line.
    most : int or None
        More lines than this there must not be; None: any number.
    glyphs : Glyphs
        What the terminal can show.
    """
    gpus = snapshot.gpus
    if not gpus:
        return [Line().add("No GPU: ", "bold").add(snapshot.gpu_problem or "see flower-gpu gpus")]
    long = [line for gpu in gpus for line in _two_lines(gpu, width, glyphs)]
    if most is None or len(long) + 1 <= most:
        return [*long, _legend(width, glyphs)]
    if len(gpus) <= most:
        return [_one_line(gpu, width, glyphs) for gpu in gpus]
    left_out = len(gpus) - most + 1
    lines = [_one_line(gpu, width, glyphs) for gpu in gpus[: most - 1]]
    return [*lines, Line().add(f"  ... {left_out} more GPUs", "dim")]


def _legend(width: int, glyphs: Glyphs) -> Line:
    line = Line().add("  ")
    meanings = ("used", "leased", "other users", "other programs", "free")
    parts = zip(_kinds(glyphs), meanings, strict=True)
    for (letter, style), meaning in parts:
        line.add(letter, style).add(f" {meaning}  ", "dim")
    return line


def _kinds(glyphs: Glyphs) -> list[tuple[str, str]]:
    """Return letter and style of each part of a bar."""
    return [
        (glyphs.used, "green"),
        (glyphs.leased, "green"),
        (glyphs.other, "magenta"),
        (glyphs.program, "yellow"),
        (glyphs.free, "dim"),
    ]


def _two_lines(gpu: GPURow, width: int, glyphs: Glyphs) -> list[Line]:
    title = [(0, _name(gpu), "bold"), (1, gpu.name or "model unknown", "")]
    if gpu.problem is not None or not gpu.total_bytes:
        return [joined(width, *title), Line().add(f"  {gpu.problem or 'its memory is not told'}", "red")]
    first = joined(
        width,
        *title,
        (0, f"used {_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)} GiB", ""),
        (0, f"busy {_percent(gpu)}", ""),
        (0, _celsius(gpu, glyphs), ""),
    )
    room = max(1, min(_LONGEST_BAR, width - 2 - _BESIDE))
    second = Line().add("  ")
    second.parts += _bar(gpu, room, glyphs)
    second.add(f"  leased {_gib(_leased(gpu))} of {_gib(gpu.capacity_bytes)} GiB")
    return [first, second]


def _one_line(gpu: GPURow, width: int, glyphs: Glyphs) -> Line:
    if gpu.problem is not None or not gpu.total_bytes:
        return Line().add(_name(gpu), "bold").add(f" {gpu.problem or 'its memory is not told'}", "red")
    line = Line().add(f"{_name(gpu):<7} ", "bold")
    line.parts += _bar(gpu, max(4, min(40, width - 56)), glyphs)
    line.add(" ")
    line.parts += joined(
        max(1, width - line.width),
        (0, f"{_gib(gpu.used_bytes):>5}/{_gib(gpu.total_bytes)} GiB", ""),
        (1, f"leased {_gib(_leased(gpu)):>5}/{_gib(gpu.capacity_bytes)}", ""),
        (2, f"{_percent(gpu):>4}", ""),
        (3, _celsius(gpu, glyphs), ""),
        gap=" ",
    ).parts
    return line


def _name(gpu: GPURow) -> str:
    return f"GPU {gpu.index}" + (" MIG" if gpu.mig_parent else "")


def _leased(gpu: GPURow) -> int | None:
    return None if gpu.capacity_bytes is None else gpu.own_leased_bytes + gpu.other_leased_bytes


def _percent(gpu: GPURow) -> str:
    return "?" if gpu.utilization_percent is None else f"{gpu.utilization_percent}%"


def _celsius(gpu: GPURow, glyphs: Glyphs) -> str:
    return "" if gpu.temperature_c is None else f"{gpu.temperature_c} {glyphs.degree}C"


def _gib(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / _GIB:.1f}"


def _bar(gpu: GPURow, cells: int, glyphs: Glyphs) -> list[tuple[str, str]]:
    """Return a bar of the GPU's memory, by who has it."""
    others = max(gpu.other_leased_bytes, gpu.other_used_bytes)
    parts = [
        gpu.own_used_bytes,
        max(0, gpu.own_leased_bytes - gpu.own_used_bytes),
        others,
        gpu.programs_bytes or 0,
    ]
    lengths = divided(cells, parts, gpu.total_bytes or 1)
    lengths.append(cells - sum(lengths))
    return [(letter * length, style) for (letter, style), length in zip(_kinds(glyphs), lengths, strict=True)]


def divided(cells: int, parts: Sequence[int], total: int) -> list[int]:
    """Return how many cells of a bar each part gets; what is not next to nothing gets one at least.

    Parameters
    ----------
    cells : int
        Of the whole bar.
    parts : sequence of int
        Amounts, 0 or more.
    total : int
        What the whole bar stands for; the sum of the parts, where that is more.
    """
    whole = max(total, sum(parts), 1)
    shares = [cells * part / whole for part in parts]
    lengths = [max(1, round(share)) if share > _NOTHING else 0 for share in shares]
    while sum(lengths) > cells:  # by rounding up: the longest has most to spare
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[longest] -= 1
    return lengths
