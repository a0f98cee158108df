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

from confined_calls import run_confined

from flower_gpu import run_in_worker
from flower_gpu.programs.confine import Allowed

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
    allowed = Allowed((str(Path(device).parent), disk))
    results["confined"] = result(run_confined, task, device, allowed=allowed, start_method="spawn", **limits)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
