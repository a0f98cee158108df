"""Makes calls in a mount namespace with device files of two GPUs, and prints which files they could open."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from confined_calls import run_confined

from flower_gpu import errors, run_in_worker
from flower_gpu.calls.grants import guard

METHODS = ("forkserver", "spawn", "fork")
#: The file of kmsg is missing, because it needs a capability of root that a confined worker has dropped.
CONFINED = ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-caps/nvidia-cap1"]


def main() -> None:
    folder = Path(sys.argv[1])
    paths = sys.argv[2:]
    report: dict[str, object] = {}
    for method in METHODS:
        for name, options in {"never": {"gpu": "never"}, "GPU 1": {"gpu_ids": 1, "num_gpus": 0.25}}.items():
            report[f"{name}, {method}"] = run_in_worker(
                "guard_tasks:paths_opened", paths, start_method=method, **options
            )
            if method != "fork":
                report[f"confined, {name}, {method}"] = run_confined(
                    "guard_tasks:paths_opened", CONFINED, start_method=method, **options
                )
    device = os.open("/dev/nvidia0", os.O_RDONLY)
    report["descriptor of the caller"] = run_in_worker(
        "guard_tasks:read_descriptor", device, start_method="fork", gpu="never"
    )
    report["new file of the device"] = run_in_worker(
        "guard_tasks:make_device", "/dev/nvidia0", str(folder / "nvidia0"), gpu="never"
    )
    report["other work with files"] = run_in_worker("guard_tasks:work_with_files", str(folder), gpu="never")
    report["open rulesets"] = run_in_worker("guard_tasks:count_rulesets", gpu="never")
    subprocess.run(["mount", "--rbind", "/dev", "/mnt"], check=True)
    report["another mount of /dev"] = run_in_worker(
        "guard_tasks:paths_opened", [path.replace("/dev", "/mnt") for path in paths], gpu="never"
    )
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flwr.flower_gpu")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for _ in range(2):
        run_in_worker("guard_tasks:return_seven", gpu="never", start_method="in-process")
    report["guard messages"] = [line for line in messages if "guard:" in line]
    report["outside of workers"] = guard.outside_of_workers()
    os.environ["FLOWER_GPU_GUARD"] = "off"
    report["off"] = run_in_worker("guard_tasks:paths_opened", paths, gpu="never")
    os.environ["FLOWER_GPU_GUARD"] = "require"
    try:
        run_in_worker("guard_tasks:paths_opened", paths, gpu="never", start_method="in-process")
    except errors.ConfigError as error:
        report["without a worker"] = str(error)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
