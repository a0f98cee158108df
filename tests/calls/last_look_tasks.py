"""Several calls of one worker, on a driver that hangs after the end of a call."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from worker_lines import Caller

from flower_gpu.calls import grants
from flower_gpu.calls.grants import memory_use
from flower_gpu.gpu import inventory
from flower_gpu.leases.lease import Lease, Share

MIB = 2**20


def train(limit_s: float | None = None) -> int:
    """Allocate GPU memory. ``limit_s``: limit for later last queries of this process, in seconds."""
    import torch

    if limit_s is not None:
        memory_use._LAST_LOOK_S = inventory._START_S = inventory._ANSWER_S = limit_s
    torch.ones(8 * MIB, device="cuda")
    return os.getpid()


def main(uuid: str) -> None:
    """Run a call in the worker for each line on stdin, and print its pid and its memory figures."""
    share = Share(uuid, 0, "A GPU", 16 << 30, 2 << 30, 1 << 30)
    env = grants.of_lease(Lease("ab12", (share,)), os.environ)
    caller = Caller("spawn", without=frozenset())
    options: dict[str, Any] = {"setup": grants.SETUP, "env": env, "calls": 100, "timeout_s": 100}
    for line in sys.stdin:
        events: list[dict[str, Any]] = []
        pid = caller.run("last_look_tasks:train", *json.loads(line), on_event=events.append, **options)
        [figures] = [event["gpus"][0] for event in events if event["event"] == "gpu_memory"]
        print(json.dumps([pid, figures]), flush=True)
    caller.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
