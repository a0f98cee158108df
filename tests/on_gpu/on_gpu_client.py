"""A separate client process: ``on_gpu_client.py '{"task": ..., "args": [...], "options": {...}}'``.

The process runs one call and prints the result as JSON. With ``fill`` it acts as a program without
flower-gpu: it allocates all of the GPU's memory except ``fill`` bytes, creates the file ``begun``, and holds
the memory until it is killed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(request: dict[str, Any]) -> None:
    if "fill" in request:
        fill(request["fill"], Path(request["begun"]))
    else:
        from flower_gpu import run_in_worker

        result = run_in_worker(f"on_gpu_tasks:{request['task']}", *request["args"], **request["options"])
        print(json.dumps(result), flush=True)


def fill(bytes_to_leave: int, begun: Path) -> None:
    import torch

    held = [torch.zeros(1, device="cuda")]
    free = torch.cuda.mem_get_info()[0]
    held.append(torch.empty(free - bytes_to_leave, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    begun.touch()
    time.sleep(300)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
