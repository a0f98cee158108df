"""Pictures of the figures, one panel for each part. The only module here that imports matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

_OURS, _OTHER, _LIMIT = "#1b6ca8", "#d9822b", "#555555"
_COLOURS = {"ours": _OURS, "leases": _OURS, "article": _OTHER, "no leases": _OTHER}
_PANEL_INCHES = (6.4, 4.2)
_GB = 1000.0  # MB

Axes = Any


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw what is there of the parts; nothing where that is nothing.

    Parameters
    ----------
    result : dict
        As written to the JSON file.
    path : Path
        Where to; its suffix says in which format.
    """
    panels = [(part, panel) for part, panel in _PANELS.items() if result.get(part)]
    if not panels:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 0.5)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    flat = list(axes.flat)
    for (part, panel), axis in zip(panels, flat, strict=False):
        panel(axis, result[part])
        axis.spines[["top", "right"]].set_visible(False)
    for axis in flat[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(_title(result), fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _title(result: dict[str, Any]) -> str:
    facts = result["machine"]
    gpu = facts.get("gpu", "no GPU")
    text = f"{gpu}, driver {facts.get('driver', 'none')}, torch {facts['torch']}, {facts['cpus']} cores"
    if result["model"] == "elementwise" or result.get("quick"):
        text += " (a trial of the benchmark: the figures mean nothing)"
    return text


def _steps(axis: Axes, rows: list[dict[str, Any]]) -> None:
    parts = [key for key in rows[0] if key.endswith("_s") and key not in ("total_s", "later_step_s")]
    ways = [row["way"] for row in rows]
    left = [0.0] * len(rows)
    for part in parts:
        widths = [row[part] for row in rows]
        axis.barh(ways, widths, left=left, label=part.removesuffix("_s").replace("_", " "))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.set_title("One call, cut into its steps")
    axis.legend(fontsize=8)


def _memory(axis: Axes, result: dict[str, Any]) -> None:
    for row in result["ways"]:
        used = [row["start_mb"], *row["used_after_mb"]]
        colour = _COLOURS[row["way"]]
        label = f"{row['way']}: {row['trained']} of {result['clients']} trained"
        axis.plot(range(len(used)), [mb / _GB for mb in used], "o-", ms=4, color=colour, label=label)
        if row["out_of_memory"]:
            at = (len(used) - 1, used[-1] / _GB)
            axis.annotate("the next one: out of memory", at, (4, 6), textcoords="offset points", fontsize=8)
    axis.axhline(result["gpu_mb"] / _GB, color=_LIMIT, ls="--", lw=1, label="the GPU's memory")
    axis.set(xlabel="clients that have trained once", ylabel="used memory, GB", ylim=(0, None))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title("Used memory after each client")
    axis.legend(fontsize=8, loc="center right")


def _oversubscribe(axis: Axes, result: dict[str, Any]) -> None:
    for row in result["ways"]:
        label = f"{row['way']}: {row['finished']} finished, {row['out_of_memory']} out of memory"
        times, used = zip(*row["used_mb"], strict=True) if row["used_mb"] else ((), ())
        colour = _COLOURS[row["way"]]
        axis.plot(times, [mb / _GB for mb in used], color=colour, lw=1.5, label=label)
        marks = row["failed_at_s"]
        if marks:
            # All at the foot: there the curve does not hide them.
            axis.plot(
                marks, [0.0] * len(marks), "x", color=colour, ms=7, clip_on=False, label="one of its failures"
            )
    axis.axhline(result["gpu_mb"] / _GB, color=_LIMIT, ls="--", lw=1, label="the GPU's memory")
    top = 1.45 * result["gpu_mb"] / _GB  # room for the legend
    axis.set(xlabel="seconds", ylabel="used memory, GB", ylim=(0, top))
    axis.set_title(f"{result['clients']} clients at once, where {result['fit']} fit")
    axis.legend(fontsize=8, loc="upper right")


def _cap(axis: Axes, result: dict[str, Any]) -> None:
    greedy, bare = result["greedy"], result["without_a_lease"]
    ways = ("lease", "no lease")
    had = [greedy["reserved_mb"] or 0.0, bare["taken_mb"] or 0.0]
    bars = axis.barh(ways, [mb / _GB for mb in had], color=[_OURS, _OTHER], height=0.5)
    texts = [greedy["error"] or "got all", bare["error"] or "got all"]
    axis.bar_label(
        bars, [f"{mb / _GB:.2f} GB: {text}" for mb, text in zip(had, texts, strict=True)], fontsize=8
    )
    axis.axvline(result["lease_mb"] / _GB, color=_LIMIT, ls="--", lw=1, label="its lease, context included")
    axis.axvline(result["asked_mb"] / _GB, color=_LIMIT, ls=":", lw=1.5, label="what it wants")
    axis.set(xlabel="GB it got", xlim=(0, 1.6 * result["asked_mb"] / _GB), ylim=(1.9, -0.6))
    same = "the same loss" if result["neighbour"]["same"] else "ANOTHER LOSS"
    axis.set_title(f"A client takes twice its lease; its neighbour: {same}")
    axis.legend(fontsize=8, loc="lower right")


def _throughput(axis: Axes, result: dict[str, Any]) -> None:
    known = sorted({row["concurrency"] for row in result["rows"]})
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    width = 0.8 / len(ways)
    top = 0.0
    for place, way in enumerate(ways):
        rows = {row["concurrency"]: row for row in result["rows"] if row["way"] == way}
        at = [known.index(number) + (place - (len(ways) - 1) / 2) * width for number in rows]
        rates = [row["rounds_per_minute"] for row in rows.values()]
        bars = axis.bar(at, rates, 0.95 * width, color=_COLOURS[way], label=way)
        ratios = result["ours_to_article"] if way == "ours" else {}
        texts = [f"{rate:.1f}" + (f"\n{ratios[str(n)]:.2f}x" if str(n) in ratios else "")
                 for n, rate in zip(rows, rates, strict=True)]  # fmt: skip
        axis.bar_label(bars, texts, fontsize=8, padding=2)
        top = max(top, *rates)
    axis.set_xticks(range(len(known)), [str(number) for number in known])
    axis.set(xlabel="clients training at a time", ylabel="rounds per minute", ylim=(0, 1.3 * top))
    axis.set_title(
        f"{result['model']}, {result['clients']} clients, {result['steps']} steps of {result['batch']} images"
    )
    title = None if result["article"] == "fits" else f"article {result['article']}"
    axis.legend(fontsize=8, loc="upper left", title=title, title_fontsize=8)


_PANELS: dict[str, Callable[[Axes, Any], None]] = {
    "steps": _steps,
    "memory": _memory,
    "oversubscribe": _oversubscribe,
    "cap": _cap,
    "throughput": _throughput,
}
