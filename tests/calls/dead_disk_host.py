"""Makes calls under the GPU guard while a network disk directly below ``/`` does not respond.

Runs in its own mount namespace, and prints the result of each call.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flower_gpu import run_in_worker
from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import call_settings
from flower_gpu.programs.confine import Allowed, for_message

TIMEOUT_S = 60


def mount_dead_disk() -> str:
    """Mount a FUSE disk without a process that handles its requests, and return its folder."""
    folder = next(path for path in map(Path, ("/mnt", "/srv", "/media", "/opt")) if path.is_dir())
    requests = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={requests},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"dead", bytes(folder), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "no FUSE disk can be mounted")
    return str(folder)


def result(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a call, or its error as text."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Make the calls."""
    [device] = sys.argv[1:]
    try:
        disk = mount_dead_disk()
    except OSError as error:
        print(json.dumps({"skip": str(error)}))
        return
    # Forks of this process inherit an open file of the disk.
    os.open(disk, os.O_PATH)
    limits = {"gpu": "never", "timeout_s": TIMEOUT_S}
    task = "guard_tasks:can_open"
    results = {
        method: result(run_in_worker, task, device, start_method=method, **limits)
        for method in ("forkserver", "spawn", "fork")
    }
    with for_message(Allowed((str(Path(device).parent), disk)), []) as confinement:
        settings = call_settings({"start_method": "spawn", **limits}).with_worker(confinement=confinement)
        confined = {"settings": settings, "kind": "train", "by_name": True}
        results["confined"] = result(run_call, task, (device,), **confined)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
