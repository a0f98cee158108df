"""GPU benchmarks. What a call costs, and what clients that share a GPU do to it: without leases, and with.

Parts: cap (a client takes twice its lease), oversubscribe (three times more clients than fit), example (an
app by each command), steps (a call cut into its steps), memory (what is used after each client), throughput
(rounds per minute), mps (small clients in turns and side by side). README.md says how to read them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from benchmarks.gpu import cap, example, memory, mps, oversubscribe, steps, throughput
from benchmarks.gpu.caller import WAYS
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.setting import MB, QUICK, Setting, Sizes, gpu, part_folder
from benchmarks.shared.driver import Figures, Options, Parser, chosen, json_file, positive, run

#: What is known soonest and matters most comes first: time may be short.
_SHARED: dict[str, ModuleType] = {
    "cap": cap,
    "oversubscribe": oversubscribe,
    "example": example,
    "memory": memory,
    "throughput": throughput,
    "mps": mps,
}
_PARTS = ("cap", "oversubscribe", "example", "steps", "memory", "throughput", "mps")
_OMP_THREADS = {"OMP_NUM_THREADS": "1"}  # many processes share the cores; what counts is on the GPU


def main() -> int:
    parser, options = _options()
    figures: Figures = {"model": options.model, "quick": options.quick}
    parts = {part: _steps if part == "steps" else partial(_share, part) for part in _PARTS}
    around, after = _on_gpu(figures), partial(_draw, options)
    return run(parser, options, parts, figures, around=around, after=after)


@contextmanager
def _on_gpu(figures: Figures) -> Iterator[None]:
    from flower_gpu.gpu import inventory

    with gpu() as uuid:
        found = inventory.take(processes=False)
        card = found.find(uuid)
        assert card is not None
        total_mb = round((card.total_bytes or 0) / MB)
        figures["machine"] |= {"gpu": card.name, "gpu_mb": total_mb, "driver": found.driver_version}
        yield


def _steps(options: Options, figures: Figures) -> None:
    sizes = options.model, options.batch, options.side
    figures["steps"] = steps.measure(options.ways, options.runs or 5, *sizes, quick=options.quick)


def _share(part: str, options: Options, figures: Figures) -> None:
    module = _SHARED[part]
    sizes = QUICK if options.quick else Sizes()
    if options.runs:
        sizes = replace(sizes, runs=options.runs)
    with part_folder(_OMP_THREADS) as folder:
        limit_s = options.limit or module.LIMIT_S
        uuid = os.environ["CUDA_VISIBLE_DEVICES"]
        figures[part] = module.measure(Setting(options.model, uuid, folder, sizes, limit_s, options.data))
    module.show(figures[part])
    module.check(figures[part])


def _draw(options: Options, figures: Figures) -> None:
    if options.plot:
        from benchmarks.gpu import plot

        plot.draw(figures, options.plot)


def _plot_file(text: str) -> Path:
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("plots need matplotlib: pip install matplotlib")
    path = json_file(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} does not end in .png, .svg or .pdf")
    return path


def _data_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path.absolute()


def _options() -> tuple[Parser, Options]:
    known = list(WAYS)
    quick, full = {"batch": 2, "side": 32}, {"batch": 32, "side": 224}
    parser = Parser("gpu", __doc__, _PARTS, quick=quick, full=full)
    limits = ", ".join(f"{part} {module.LIMIT_S:g}" for part, module in _SHARED.items())
    parser.add_argument("--plot", type=_plot_file, metavar="FILE",
                        help="also draw them (.png, .svg, .pdf); needs matplotlib")  # fmt: skip
    parser.add_argument("--limit", type=positive, metavar="SECONDS",
                        help=f"time for each part but steps; default: {limits}")  # fmt: skip
    parser.add_argument("--runs", type=positive, metavar="N",
                        help="runs of each way in steps (default: 5), throughput and mps (3)")  # fmt: skip
    parser.add_argument("--data", type=_data_file, metavar="NPZ",
                        help="images for memory and throughput: labels, and images (uint8, n x 32 x 32 x 3) "
                        "or jpeg and offsets; default: generated ones")  # fmt: skip
    parser.add_argument("--ways", type=partial(chosen, known), default=known, metavar="WAY,WAY",
                        help=f"of steps: some of {', '.join(known)}; default: all")  # fmt: skip
    parser.add_argument("--batch", type=positive, metavar="N",
                        help="of steps: images per step; default: 32")  # fmt: skip
    parser.add_argument("--side", type=positive, metavar="PIXELS",
                        help="of steps: of an image; default: 224")  # fmt: skip
    parser.add_argument("--model", choices=tuple(MODELS), default="resnet18",
                        help="elementwise needs no cuBLAS and no cuDNN, and learns nothing: it is for a "
                        "stand-in for CUDA, on which figures mean nothing")  # fmt: skip
    return parser, parser.parse()


if __name__ == "__main__":
    sys.exit(main())
