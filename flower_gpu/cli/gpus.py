"""``flower-gpu gpus``: the GPUs of this host, their use, and the reason if a GPU cannot be used."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Collection, Iterator
from typing import Any, Final

from flower_gpu.calls.grants import driver_cap
from flower_gpu.cli.arguments import Command
from flower_gpu.gpu import drivers, inventory
from flower_gpu.gpu.gpus import GPU, Inventory
from flower_gpu.kinds import SWITCH
from flower_gpu.options import Option
from flower_gpu.printable import format_bytes

_VARIABLE = drivers.of_host().visible_variable
_GIB = 2**30
_WIDTH = 80
_MARGIN = " " * 7
_UNKNOWN = "unknown"


def run(arguments: argparse.Namespace) -> int:
    """Print the GPUs, and return 0, even for a host without GPUs."""
    gpu_inventory = inventory.take()
    cap = driver_cap.describe(tuple(gpu.uuid for gpu in gpu_inventory.usable[:1]), os.environ)
    inventory.close()
    variable = os.environ.get(_VARIABLE)
    if arguments.json:
        print(json.dumps(as_json(gpu_inventory, variable, cap), indent=2))
    else:
        print(as_text(gpu_inventory, variable, cap))
    return 0


def as_json(host_gpus: Inventory, variable: str | None, cap: str) -> dict[str, Any]:
    """Return the inventory for JSON. The keys stay the same in all versions."""
    visible = host_gpus.visible(variable)
    return {
        "driver_version": host_gpus.driver_version,
        "problem": host_gpus.problem,
        "cuda_visible_devices": variable,
        "cap": cap if host_gpus.usable else None,
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid or None,
                "name": gpu.name or None,
                "mig_parent": gpu.mig_parent,
                "usable": gpu.is_usable,
                "visible": gpu in visible,
                "problem": gpu.problem,
                "total_bytes": gpu.total_bytes,
                "used_bytes": gpu.used_bytes,
                "free_bytes": gpu.free_bytes,
                "reserved_bytes": gpu.reserved_bytes,
                "limited_by": gpu.limited_by,
                "utilization_percent": gpu.utilization_percent,
                "processes": None
                if gpu.processes is None
                else [
                    {"pid": process.pid, "name": process.name or None, "used_bytes": process.used_bytes}
                    for process in gpu.processes
                ],
            }
            for gpu in host_gpus.gpus
        ],
    }


def as_text(host_gpus: Inventory, variable: str | None, cap: str) -> str:
    """Return the inventory as a table. It is at most 80 columns wide, unless a name is too long."""
    visible = host_gpus.visible(variable)
    driver = f"{drivers.of_host().name} driver {host_gpus.driver_version or _UNKNOWN}"
    if not host_gpus.gpus:
        text = f"No GPU: {host_gpus.problem}."
        return "\n".join([driver, *_wrapped(text)] if host_gpus.driver_version else _wrapped(text))
    usable = f"{len(host_gpus.usable)} of {len(host_gpus.gpus)} usable"
    lines = _wrapped(f"{driver}: {usable}. {_about_variable(variable, visible)}")
    lines += ["", _row("GPU", "UUID", "MEMORY USED", "BUSY")]
    for gpu in host_gpus.gpus:
        lines += _gpu_as_text(gpu, visible)
    if host_gpus.usable:
        lines += ["", *_wrapped(cap)]
    return "\n".join(lines)


def _about_variable(variable: str | None, visible: Collection[GPU]) -> str:
    if variable is None:
        return f"{_VARIABLE} is not set: all are visible."
    shown = f"{_VARIABLE}={variable if variable.isprintable() else repr(variable)}"
    if not visible:
        return f"{shown} hides them all."
    return f"{shown} leaves {len(visible)} visible."


def _row(number: str, uuid: str, memory: str, busy: str) -> str:
    return f"{number:<5}  {uuid:<40}  {memory:>18}  {busy:>7}"


def _gpu_as_text(gpu: GPU, visible: Collection[GPU]) -> Iterator[str]:
    number = f"{gpu.index}" if gpu.mig_parent is None else f"{gpu.index} MIG"
    busy = _UNKNOWN if gpu.utilization_percent is None else f"{gpu.utilization_percent}%"
    yield _row(number, gpu.uuid or _UNKNOWN, _memory(gpu), busy)
    details = [gpu.name or "model unknown", "visible" if gpu in visible else "not visible"]
    if gpu.reserved_bytes:
        details.append(f"driver reserves {format_bytes(gpu.reserved_bytes)}")
    if gpu.limited_by:
        details.append(f"limited by control group {gpu.limited_by}")
    yield from _wrapped("; ".join(details), _MARGIN)
    if gpu.problem is not None:
        yield from _wrapped(f"not usable ({gpu.problem})", _MARGIN)
    elif gpu.processes is None:
        yield f"{_MARGIN}the driver does not report who uses it"
    for process in gpu.processes or ():
        used = _UNKNOWN if process.used_bytes is None else format_bytes(process.used_bytes)
        program = process.name.rpartition("/")[2] or "(no such process here)"
        yield f"{_MARGIN}{used:>10}  pid {process.pid:<8} {program}"


def _memory(gpu: GPU) -> str:
    if gpu.used_bytes is None or gpu.total_bytes is None:
        return _UNKNOWN
    return f"{gpu.used_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB"


def _wrapped(text: str, margin: str = "") -> list[str]:
    # UUIDs and paths must stay in one piece, so that users can copy them.
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=margin,
        subsequent_indent=margin + ("  " if margin else ""),
        break_long_words=False,
        break_on_hyphens=False,
    )


COMMAND: Final = Command(
    "list this machine's GPUs: memory, processes, and problems",
    """\
List the GPUs of this machine with the figures of NVIDIA's driver: number, model, UUID, memory, processes,
visibility by CUDA_VISIBLE_DEVICES, and the reason if one cannot be used, or if there is none. Nothing is
started on them. Missing figures are "unknown", and a GPU without memory figures is never leased.""",
    run,
    {"json": Option("print it as JSON, with all figures in bytes", SWITCH)},
)
