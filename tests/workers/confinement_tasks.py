"""What an ordinary app does, in a confined worker."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VARIABLES = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def variables() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in VARIABLES:
        Path(os.environ[name], "file").write_text("mine")
        found[name] = os.environ[name]
    found["agent"] = os.environ.get("SSH_AUTH_SOCK")
    found["tempfile"] = tempfile.gettempdir()
    return found


def reads(path: str) -> str:
    return Path(path).read_text()


def writes(path: str) -> str:
    Path(path).write_text("written by an app")
    return "done"


def connects(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), 5):
        return "done"


def opens_udp() -> str:
    with socket.socket(type=socket.SOCK_DGRAM):
        return "done"


def _square(number: int) -> int:
    return number * number


def computes_in_processes() -> list[Any]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squares = pool.map(_square, [1, 2, 3])
    with multiprocessing.Manager() as manager:
        shared = manager.dict(a=1)
        found = dict(shared)
    lock = multiprocessing.Lock()
    with lock:
        pass
    line = [sys.executable, "-c", "print('from a program')"]
    return [squares, found, subprocess.run(line, capture_output=True, text=True, check=True).stdout]


def asks_another_worker(path: str) -> list[str]:
    from flower_gpu import run_in_worker

    try:
        run_in_worker("confinement_tasks:reads", path, start_method="spawn")
    except OSError as error:
        return [str(run_in_worker(complex, 1, 2, start_method="spawn")), type(error).__name__]
    return ["was read"]


def loads_data() -> list[float]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(8.0))
    return sorted(float(value) for (batch,) in DataLoader(data, 2, num_workers=2) for value in batch)


def sets_a_variable_too_late() -> str:
    return os.environ["HF_HOME"]


def waits(file: str) -> None:
    """Say that it is there, and wait for the end."""
    import time

    Path(os.environ["HOME"], "file").write_text(file)
    print("waits", flush=True)
    time.sleep(600)
