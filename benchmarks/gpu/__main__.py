"""Clients on a real GPU: the cost of a call, and clients that share the GPU with and without leases.

Parts: cap (a client requests twice its lease), oversubscribe (three times more clients than fit), example (an
app by each command), steps (one call, cut into its steps), memory (memory in use after each client),
throughput (rounds per minute), mps (small clients side by side). README.md in this folder explains the
figures.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

from benchmarks.gpu import cap, example, memory, mps, oversubscribe, steps, throughput
from benchmarks.gpu.caller import WAYS
from benchmarks.gpu.setting import MB, QUICK, Setting, Sizes, gpu, part_folder
from benchmarks.shared.driver import Figures, Options, Parser, Part, chosen, positive, run

_MODULES: dict[str, ModuleType] = {
    "cap": cap,
    "oversubscribe": oversubscribe,
    "example": example,
    "memory": memory,
    "throughput": throughput,
    "mps": mps,
}
#: The shortest and most important parts come first, because the host may be available for a short time.
_PARTS = ("cap", "oversubscribe", "example", "steps", "memory", "throughput", "mps")


def main() -> int:
    parser = _parser()
    options = parser.parse()
    figures: Figures = {"model": options.model}
    parts: dict[str, Part] = {
        part: partial(_measure, part) if part in _MODULES else steps.measure for part in _PARTS
    }
    return run(parser, options, parts, figures=figures, around=_on_gpu(figures))


@contextmanager
def _on_gpu(figures: Figures) -> Iterator[None]:
    from flower_gpu.gpu import inventory

    with gpu() as uuid:
        listed = inventory.take(processes=False)
        card = listed.find(uuid)
        assert card is not None
        total_mb = round((card.total_bytes or 0) / MB)
        figures["machine"] |= {"gpu": card.name, "gpu_mb": total_mb, "driver": listed.driver_version}
        yield


def _measure(part: str, options: Options, figures: Figures) -> None:
    module = _MODULES[part]
    sizes = QUICK if options.quick else Sizes()
    if options.runs:
        sizes = replace(sizes, runs=options.runs)
    with part_folder() as folder:
        limit_s = options.limit or module.LIMIT_S
        uuid = os.environ["CUDA_VISIBLE_DEVICES"]
        figures[part] = module.measure(Setting(options.model, uuid, folder, sizes, limit_s, options.data))
    module.show(figures[part])
    module.check(figures[part])


def _data_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path.absolute()


def _parser() -> Parser:
    known = list(WAYS)
    quick, full = {"batch": 2, "side": 32}, {"batch": 32, "side": 224}
    parser = Parser("gpu", __doc__, _PARTS, quick=quick, full=full)
    add = parser.add_argument
    limits = ", ".join(f"{part} {module.LIMIT_S:g}" for part, module in _MODULES.items())
    add("--limit", type=positive, metavar="SECONDS", help=f"time limit of each part; default: {limits}")
    add("--runs", type=positive, metavar="N",
        help="number of runs per row of steps (default: 5), throughput and mps (3)")  # fmt: skip
    add("--data", type=_data_file, metavar="NPZ",
        help="images of memory and throughput: labels, and images (uint8, n x 32 x 32 x 3) or jpeg and "
        "offsets; default: generated images")  # fmt: skip
    add("--ways", type=partial(chosen, known), default=known, metavar="WAY,WAY",
        help=f"steps: run only these ways: {', '.join(known)}; default: all")  # fmt: skip
    add("--batch", type=positive, metavar="N", help="steps: images per step; default: 32")
    add("--side", type=positive, metavar="PIXELS", help="steps: side of an image; default: 224")
    add("--model", choices=("resnet18", "elementwise"), default="resnet18",
        help="elementwise needs no cuBLAS and no cuDNN. It is for a stand-in for CUDA")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
