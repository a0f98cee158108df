"""Plain tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; the first column to the left, figures to the right."""
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    print(f"\n{title}")
    for row in cells:
        aligned = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(aligned).rstrip(), flush=True)


def seconds(value: float) -> str:
    """Return a time with three digits that mean something."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def times_faster(value: float, reference: float | None) -> str:
    """Return how often ``value`` fits into that of the article's way."""
    if reference is None:
        return ""
    ratio = reference / value
    return f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"


def show_figures(title: str, figures: dict[str, Any]) -> None:
    """Print one figure per line."""
    show(title, ("", ""), list(figures.items()))
