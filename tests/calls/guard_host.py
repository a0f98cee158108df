"""Calls on a host with device files of two GPUs, in mounts of its own; prints what they could open."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from flower_gpu import errors, run_in_worker
from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import call_settings
from flower_gpu.flower.confine import Allowed, for_message
from flower_gpu.gpu import guard

METHODS = ("forkserver", "spawn", "fork")
#: Not the file of kmsg, which takes a right of root's that a confined worker has given up.
CONFINED = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-caps/nvidia-cap1"]


def main() -> None:
    folder = Path(sys.argv[1])
    paths = sys.argv[2:]
    found: dict[str, object] = {}
    for method in METHODS:
        for name, options in {"never": {"gpu": "never"}, "GPU 1": {"gpu_ids": 1, "num_gpus": 0.25}}.items():
            found[f"{name}, {method}"] = run_in_worker(
                "guard_tasks:opened", paths, start_method=method, **options
            )
            if method != "fork":
                found[f"confined, {name}, {method}"] = confined(start_method=method, **options)
    device = os.open("/dev/nvidia0", os.O_RDONLY)
    found["left open"] = run_in_worker("guard_tasks:read", device, start_method="fork", gpu="never")
    found["made"] = run_in_worker(
        "guard_tasks:make_device", "/dev/nvidia0", str(folder / "nvidia0"), gpu="never"
    )
    found["else"] = run_in_worker("guard_tasks:everything_else", str(folder), gpu="never")
    found["rules left open"] = run_in_worker("guard_tasks:rulesets", gpu="never")
    subprocess.run(["mount", "--rbind", "/dev", "/mnt"], check=True)
    found["elsewhere"] = run_in_worker(
        "guard_tasks:opened", [path.replace("/dev", "/mnt") for path in paths], gpu="never"
    )
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flwr.flower_gpu")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for _ in range(2):
        run_in_worker("guard_tasks:seven", gpu="never", start_method="in-process")
    found["said"] = [line for line in said if "guard:" in line]
    found["outside of workers"] = guard.outside_of_workers()
    os.environ["FLOWER_GPU_GUARD"] = "off"
    found["off"] = run_in_worker("guard_tasks:opened", paths, gpu="never")
    os.environ["FLOWER_GPU_GUARD"] = "require"
    try:
        run_in_worker("guard_tasks:opened", paths, gpu="never", start_method="in-process")
    except errors.ConfigError as error:
        found["without a worker"] = str(error)
    print(json.dumps(found))


def confined(**options: Any) -> Any:
    """Make the call as ``flower-gpu supernode --confine`` does."""
    settings = call_settings(options)
    with for_message(Allowed(), []) as found:
        return run_call(
            "guard_tasks:opened",
            (CONFINED,),
            settings=settings.with_worker(confinement=found),
            kind="train",
            by_name=True,
        )


if __name__ == "__main__":
    main()
