"""GPU benchmarks. What a call costs, and what clients that share a GPU do to it: without leases, and with.

Parts: steps (a call cut into its steps), memory (what is used after each client), oversubscribe (three times
more clients than fit), cap (a client takes twice its lease), throughput (rounds per minute). README.md says
how to read them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import gpu_cap
import gpu_memory
import gpu_oversubscribe
import gpu_steps
import gpu_throughput
import machine
from gpu_caller import WAYS
from gpu_setting import MB, QUICK, Setting, Sizes, gpu, part_folder
from options import EXIT_USAGE, Parser, chosen, json_file, positive
from processes import BenchmarkError, end_descendants, new_state_folder, nothing_left_behind

# With whole leases, so not on a device that has none.
_SHARED: dict[str, ModuleType] = {
    "memory": gpu_memory,
    "oversubscribe": gpu_oversubscribe,
    "cap": gpu_cap,
    "throughput": gpu_throughput,
}
_PARTS = ("steps", *_SHARED)
_PARTS_OF = {"cuda": _PARTS, "cpu": ("steps",), "stub": tuple(_SHARED)}
_OMP_THREADS = {"OMP_NUM_THREADS": "1"}  # many processes share the cores; what counts is on the GPU


def main() -> int:
    options = _options()
    result: dict[str, Any] = {"device": options.device, "quick": options.quick}
    failed: dict[str, str] = {}
    try:
        with nothing_left_behind():
            if options.device == "cpu":
                result["machine"] = machine.describe()
                _run_all(options, "", result, failed)
            else:
                with gpu(options.device) as uuid:
                    result["machine"] = _described(options, uuid)
                    _run_all(options, uuid, result, failed)
    except BenchmarkError as error:
        print(f"gpu.py: {error}; nothing measured", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    return 1 if failed else 0


def _run_all(options: argparse.Namespace, uuid: str, result: dict[str, Any], failed: dict[str, str]) -> None:
    """Run the parts, and write down after each what there is; one that fails does not lose the others."""
    for part in options.only:
        began = time.monotonic()
        print(f"\n== {part}", flush=True)
        try:
            _run(part, options, uuid, result)
        except Exception as error:
            failed[part] = f"{type(error).__name__}: {error}"
            print(f"gpu.py: {part}: {error}", file=sys.stderr)
            if not isinstance(error, BenchmarkError):
                traceback.print_exc()
        finally:
            end_descendants()  # nobody of this part is on the GPU in the next one
            new_state_folder()
        print(f"-- {part}: {time.monotonic() - began:.0f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps({**result, "failed": failed}, indent=1) + "\n")
        if options.plot:
            import gpu_plot

            gpu_plot.draw(result, options.plot)


def _run(part: str, options: argparse.Namespace, uuid: str, result: dict[str, Any]) -> None:
    if part == "steps":
        steps = gpu_steps.measure(
            options.ways, options.runs or 5, options.device, options.batch, options.side
        )
        result[part] = steps
        gpu_steps.show(steps, options.device)
        return
    module = _SHARED[part]
    with part_folder(_OMP_THREADS) as folder:
        limit_s = options.limit or module.LIMIT_S
        setting = Setting(options.device, uuid, folder, _sizes(options), limit_s, options.data)
        result[part] = module.measure(setting)
    module.show(result[part])
    module.check(result[part])


def _sizes(options: argparse.Namespace) -> Sizes:
    sizes = QUICK if options.quick else Sizes()
    if options.runs:
        sizes = Sizes(**{**vars(sizes), "runs": options.runs})
    return sizes


def _described(options: argparse.Namespace, uuid: str) -> dict[str, Any]:
    from flower_gpu.gpu import inventory

    found = inventory.take(processes=False)
    card = found.find(uuid)
    assert card is not None
    total_mb = round((card.total_bytes or 0) / MB)
    return {**machine.describe(), "gpu": card.name, "gpu_mb": total_mb, "driver": found.driver_version}


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


def _options() -> argparse.Namespace:
    known = list(WAYS)
    parser = Parser(prog="gpu.py", description=__doc__, allow_abbrev=False)
    limits = ", ".join(f"{part} {module.LIMIT_S:g}" for part, module in _SHARED.items())
    parser.add_argument("--only", type=partial(chosen, _PARTS), metavar="PART,PART",
                        help=f"some of {', '.join(_PARTS)}; default: all")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="everything tiny, to see that it works")
    parser.add_argument("--json", type=json_file, metavar="FILE",
                        help="also write the figures there, after each part")  # fmt: skip
    parser.add_argument("--plot", type=_plot_file, metavar="FILE",
                        help="also draw them (.png, .svg, .pdf); needs matplotlib")  # fmt: skip
    parser.add_argument("--limit", type=positive, metavar="SECONDS",
                        help=f"time for each part but steps; default: {limits}")  # fmt: skip
    parser.add_argument("--runs", type=positive, metavar="N",
                        help="runs of each way in steps (default: 5) and throughput (3)")  # fmt: skip
    parser.add_argument("--data", type=_data_file, metavar="NPZ",
                        help="images for memory and throughput: labels, and images (uint8, n x 32 x 32 x 3) "
                        "or jpeg and offsets; default: generated ones")  # fmt: skip
    parser.add_argument("--ways", type=partial(chosen, known), default=known, metavar="WAY,WAY",
                        help=f"of steps: some of {', '.join(known)}; default: all")  # fmt: skip
    parser.add_argument("--batch", type=positive, default=32, metavar="N",
                        help="of steps: images per step; default: 32")  # fmt: skip
    parser.add_argument("--side", type=positive, default=224, metavar="PIXELS",
                        help="of steps: of an image; default: 224")  # fmt: skip
    # Neither the CPU nor a simulated GPU shows anything but that the script works.
    parser.add_argument("--device", choices=tuple(_PARTS_OF), default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args()
    possible = _PARTS_OF[options.device]
    options.only = options.only or list(possible)
    if missing := [part for part in options.only if part not in possible]:
        parser.error(f"{missing[0]} does not run on {options.device}")
    return options


if __name__ == "__main__":
    sys.exit(main())
