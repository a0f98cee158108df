"""Plain-text tables of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def show(title: str, rows: Sequence[Mapping[str, Any]], columns: str = "") -> None:
    """Print rows of figures under their names.

    Parameters
    ----------
    title : str
        Printed above the table.
    rows : sequence of mapping
        The same rows as in the JSON file. Names end in their unit.
    columns : str, optional
        Names of the columns to print, separated by spaces; default: all columns of the first row.
    """
    names = columns.split() or list(rows[0])
    cells = [names, *([_text(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for first, *others in cells:
        padded = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        print("  ".join(padded).rstrip(), flush=True)


def show_figures(title: str, figures: Mapping[str, Any]) -> None:
    """Print one figure per line."""
    show(title, [{"figure": name, "value": value} for name, value in figures.items()])


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return "" if value is None else str(value)
