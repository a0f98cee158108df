"""``flower-gpu footprint``: show or forget the measured GPU memory of tasks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from flower_gpu.cli.arguments import JSON, Command, is_quiet
from flower_gpu.leases.footprint import Footprints, Peaks
from flower_gpu.leases.footprint_rule import Key, needed_bytes
from flower_gpu.printable import format_bytes, path_text

#: Exit status of `clear --task` if no footprint of the task is known.
EXIT_NO_TASK = 1


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    clear = actions.add_parser(
        "clear", help="forget all footprints and the sizes of CUDA contexts", allow_abbrev=False
    )
    clear.add_argument("--task", metavar="NAME", help="only the footprints of this task")
    # It has no default here, because --json may also stand before the action.
    clear.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Show or clear footprints, and return the exit status."""
    footprints = Footprints()
    if arguments.action == "clear":
        return _clear(footprints, arguments.task, in_json=arguments.json)
    entries, contexts = footprints.entries(), footprints.contexts()
    if arguments.json:
        print(json.dumps(as_json(entries, contexts), indent=2))
    elif entries or contexts:
        print(describe(entries, contexts))
    elif not is_quiet(arguments):
        print(
            f"no footprint has been learned yet (footprints are kept in {path_text(footprints.path)})",
            file=sys.stderr,
        )
    return 0


def _clear(footprints: Footprints, task: str | None, *, in_json: bool) -> int:
    tasks = sorted({key.task for key in footprints.entries()})
    removed = footprints.clear(task)
    if in_json:
        print(json.dumps({"cleared": removed}))
    else:
        print(f"forgot {removed} footprint{'' if removed == 1 else 's'}")
    if task is not None and not removed:
        known = f"there are footprints of {', '.join(tasks)}" if tasks else "there are no footprints"
        print(f"no footprint of the task {task}; {known}", file=sys.stderr)
        return EXIT_NO_TASK
    return 0


def as_json(entries: Mapping[Key, Peaks], contexts: Mapping[str, Peaks]) -> dict[str, Any]:
    """Return the output of `--json`, with sizes in bytes and times as Unix time."""
    return {
        "footprints": [
            {
                "task": key.task,
                "weights": key.weights,
                "gpu": key.gpu,
                "sizes": dict(key.sizes),
                "peak_bytes": peaks.peak_bytes,
                "needed_bytes": needed_bytes(peaks.peak_bytes),
                "last_bytes": peaks.recent_bytes[-1],
                "measured": peaks.measured,
                "updated_s": peaks.updated_s,
            }
            for key, peaks in entries.items()
        ],
        "contexts": [
            {
                "gpu": gpu,
                "context_bytes": sizes.context_bytes,
                "measured": sizes.measured,
                "updated_s": sizes.updated_s,
            }
            for gpu, sizes in contexts.items()
        ],
    }


def describe(entries: Mapping[Key, Peaks], contexts: Mapping[str, Peaks]) -> str:
    """Return tables of the footprints and of the sizes of CUDA contexts."""
    tables = []
    if entries:
        rows = [("TASK", "WEIGHTS", "GPU", "SIZES", "PEAK", "ASKS FOR", "MEASURED", "LAST")]
        for key, peaks in entries.items():
            rows.append(
                (
                    key.task,
                    key.weights,
                    key.gpu,
                    " ".join(f"{name}={value}" for name, value in key.sizes) or "-",
                    format_bytes(peaks.peak_bytes),
                    format_bytes(needed_bytes(peaks.peak_bytes)),
                    *_measured(peaks),
                )
            )
        tables.append(_table(rows))
    if contexts:
        rows_of_contexts = [("CUDA CONTEXT ON", "SIZE", "MEASURED", "LAST")]
        for gpu, sizes in contexts.items():
            rows_of_contexts.append((gpu, format_bytes(sizes.context_bytes), *_measured(sizes)))
        tables.append(_table(rows_of_contexts))
    return "\n\n".join(tables)


def _measured(peaks: Peaks) -> tuple[str, str]:
    when = datetime.fromtimestamp(peaks.updated_s).astimezone()
    return ("once" if peaks.measured == 1 else f"{peaks.measured} times", when.strftime("%Y-%m-%d %H:%M"))


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


COMMAND: Final = Command(
    "show or forget the measured GPU memory of tasks",
    """\
A call that names neither num_gpus nor gpu_memory asks for the measured memory of earlier calls of its task,
plus a margin. This shows the measurements of this user on this host. After `clear` the next call of a task
gets a GPU to itself again, and is measured.""",
    run,
    JSON,
    add=_add_actions,
)
