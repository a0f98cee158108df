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


def show_calls(rows: list[dict[str, Any]]) -> None:
    """Print one table per size and call."""
    for size_mb in dict.fromkeys(row["weights_mb"] for row in rows):
        for call in dict.fromkeys(row["call"] for row in rows):
            chosen = [row for row in rows if (row["weights_mb"], row["call"]) == (size_mb, call)]
            reference = next((row["median_s"] for row in chosen if row["way"] == "article"), None)
            show(
                f"{call}, {size_mb:g} MB of weights",
                ("way", "median", "min", "max", "runs", "faster than article", "caller peak MB"),
                [
                    (
                        row["way"],
                        *(seconds(row[key]) for key in ("median_s", "min_s", "max_s")),
                        row["runs"],
                        times_faster(row["median_s"], reference),
                        f"{row['caller_peak_mb']:.0f}",
                    )
                    for row in chosen
                ],
            )


def show_client(rows: list[dict[str, Any]]) -> None:
    """Print the seconds of each fit, and the median from the third on."""
    reference = next((row["later_median_s"] for row in rows if row["way"] == "article"), None)
    count = len(rows[0]["seconds"]) if rows else 0
    show(
        "fit of a real client (torch, scikit-learn, flwr-datasets; a data set in a global), s per call",
        ("way", *map(str, range(1, count + 1)), "median from 3rd", "faster than article"),
        [
            (
                row["way"],
                *(f"{value:.2f}" for value in row["seconds"]),
                "" if row["later_median_s"] is None else seconds(row["later_median_s"]),
                "" if reference is None else times_faster(row["later_median_s"], reference),
            )
            for row in rows
        ],
    )


def show_memory(rows: list[dict[str, Any]]) -> None:
    """Print what waiting clients hold, for each number of clients."""
    for count in dict.fromkeys(row["clients"] for row in rows):
        chosen = [row for row in rows if row["clients"] == count]
        plain = next((row["client_mb"] for row in chosen if row["fits"] == 0), None)
        show(
            f"{count} waiting client{'s' * (count > 1)}, MB",
            (
                "way",
                "fits",
                "weights",
                "torch in client",
                "a client",
                "over plain",
                "processes",
                "all",
                "all per client",
            ),
            [
                (
                    row["way"],
                    row["fits"],
                    f"{row['weights_mb']:g}",
                    "yes" if row["torch_in_client"] else "no",
                    f"{row['client_mb']:.0f}",
                    "" if plain is None else f"{row['client_mb'] - plain:.0f}",
                    row["processes"],
                    f"{row['all_mb']:.0f}",
                    f"{row['all_per_client_mb']:.0f}",
                )
                for row in chosen
            ],
        )
