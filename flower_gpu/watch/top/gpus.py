"""The GPUs of a snapshot: a bar of memory, and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from flower_gpu.watch.top.snapshot import GPURow, Snapshot
from flower_gpu.watch.top.tables import joined, text

if TYPE_CHECKING:
    from rich.text import Text

_GIB = 2**30
_LONGEST_BAR: Final = 64
_NOTHING: Final = 0.05  # of a cell
_BESIDE: Final = 26  # cells beside a bar, for what is leased
#: The parts of a bar: letter, letter of a terminal that knows ASCII only, style, meaning.
_PARTS: Final = (
    ("█", "#", "green", "used"),
    ("▒", "+", "green", "leased"),
    ("▚", "o", "magenta", "other users"),
    ("▬", "=", "yellow", "other programs"),
    ("·", ".", "dim", "free"),
)


def gpu_lines(snapshot: Snapshot, width: int, most: int | None, *, is_ascii: bool) -> list[Text]:
    """Return the GPUs: two lines each and what the bars mean, or one each where there are at most so many."""
    gpus = snapshot.gpus
    if not gpus:
        return [text(("No GPU: ", "bold"), (snapshot.gpu_problem or "see flower-gpu gpus", ""))]
    long = [line for gpu in gpus for line in _two_lines(gpu, width, is_ascii)]
    if most is None or len(long) + 1 <= most:
        meanings = [
            part
            for letter, plain, style, meaning in _PARTS
            for part in ((plain if is_ascii else letter, style), (f" {meaning}  ", "dim"))
        ]
        return [*long, text(("  ", ""), *meanings)]
    short = [_one_line(gpu, width, is_ascii) for gpu in gpus]
    if len(gpus) <= most:
        return short
    return [*short[: most - 1], text((f"  ... {len(gpus) - most + 1} more GPUs", "dim"))]


def _two_lines(gpu: GPURow, width: int, is_ascii: bool) -> list[Text]:
    title = [(0, _name(gpu), "bold"), (1, gpu.name or "model unknown", "")]
    if problem := _problem(gpu):
        return [joined(width, *title), text((f"  {problem}", "red"))]
    used = f"used {_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)} GiB"
    busy, celsius = f"busy {_percent(gpu)}", _celsius(gpu, is_ascii)
    first = joined(width, *title, (0, used, ""), (0, busy, ""), (0, celsius, ""))
    bar = _bar(gpu, max(1, min(_LONGEST_BAR, width - 2 - _BESIDE)), is_ascii)
    leased = f"  leased {_gib(_leased(gpu))} of {_gib(gpu.capacity_bytes)} GiB"
    return [first, text(("  ", ""), *bar, (leased, ""))]


def _one_line(gpu: GPURow, width: int, is_ascii: bool) -> Text:
    if problem := _problem(gpu):
        return text((_name(gpu), "bold"), (f" {problem}", "red"))
    line = text((f"{_name(gpu):<7} ", "bold"), *_bar(gpu, max(4, min(40, width - 56)), is_ascii), (" ", ""))
    return line.append_text(
        joined(
            max(1, width - line.cell_len),
            (0, f"{_gib(gpu.used_bytes):>5}/{_gib(gpu.total_bytes)} GiB", ""),
            (1, f"leased {_gib(_leased(gpu)):>5}/{_gib(gpu.capacity_bytes)}", ""),
            (2, f"{_percent(gpu):>4}", ""),
            (3, _celsius(gpu, is_ascii), ""),
            gap=" ",
        )
    )


def _name(gpu: GPURow) -> str:
    return f"GPU {gpu.index}" + (" MIG" if gpu.mig_parent else "")


def _problem(gpu: GPURow) -> str:
    return gpu.problem or ("" if gpu.total_bytes else "its memory is not told")


def _leased(gpu: GPURow) -> int | None:
    return None if gpu.capacity_bytes is None else gpu.own_leased_bytes + gpu.other_leased_bytes


def _percent(gpu: GPURow) -> str:
    return "?" if gpu.utilization_percent is None else f"{gpu.utilization_percent}%"


def _celsius(gpu: GPURow, is_ascii: bool) -> str:
    return "" if gpu.temperature_c is None else f"{gpu.temperature_c} {'' if is_ascii else '°'}C"


def _gib(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / _GIB:.1f}"


def _bar(gpu: GPURow, cells: int, is_ascii: bool) -> list[tuple[str, str]]:
    """Return a bar of the GPU's memory, by who has it."""
    parts = [
        gpu.own_used_bytes,
        max(0, gpu.own_leased_bytes - gpu.own_used_bytes),
        max(gpu.other_leased_bytes, gpu.other_used_bytes),
        gpu.programs_bytes or 0,
    ]
    lengths = divided(cells, parts, gpu.total_bytes or 1)
    lengths.append(cells - sum(lengths))
    return [
        ((plain if is_ascii else letter) * length, style)
        for (letter, plain, style, _), length in zip(_PARTS, lengths, strict=True)
    ]


def divided(cells: int, parts: Sequence[int], total: int) -> list[int]:
    """Return how many cells of a bar each part of a total gets: one at least for more than nothing."""
    whole = max(total, sum(parts), 1)
    shares = [cells * part / whole for part in parts]
    lengths = [max(1, round(share)) if share > _NOTHING else 0 for share in shares]
    while sum(lengths) > cells:  # by rounding up: the longest has most to spare
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[longest] -= 1
    return lengths
