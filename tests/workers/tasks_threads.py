"""Tasks that report how many threads the libraries of their process use."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import files
from pathlib import Path
from typing import Any

import numpy as np


def another_openmp() -> ctypes.CDLL:
    """Load scikit-learn's OpenMP runtime without scikit-learn, which takes seconds to import."""
    (library,) = (file for file in files("scikit-learn") or [] if file.name.startswith("libgomp"))
    return ctypes.CDLL(str(library.locate()))


def count_threads() -> dict[str, Any]:
    """Load the libraries unless they are loaded, and return their numbers of threads."""
    import scipy.linalg  # noqa: F401
    import threadpoolctl
    import torch

    another_openmp()
    counts: dict[str, Any] = {"torch": torch.get_num_threads()}
    with ThreadPoolExecutor(1) as pool:
        counts["torch in a new thread"] = pool.submit(torch.get_num_threads).result()
    if match := re.search(r"mkl_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info()):
        counts["torch's MKL"] = int(match[1])
    for library in threadpoolctl.threadpool_info():
        counts[Path(library["filepath"]).name] = library["num_threads"]
    return counts


def variable_and_torch() -> tuple[str | None, int]:
    import torch

    return os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()


def compute() -> None:
    """Compute with several threads in each library. In a fork with a broken runtime, this never ends."""
    import scipy.linalg
    import torch

    ones = torch.ones(600, 600)
    assert float((ones @ ones).sum() + torch.exp(torch.zeros(400 * 400)).sum()) == 600**3 + 400**2
    values = np.random.default_rng(1).random((700, 700))
    assert (values @ np.eye(700) == values).all()
    assert scipy.linalg.svdvals(values[:200, :200]).shape == (200,)
    begun: list[int] = []
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: begun.append(threading.get_native_id()))
    another_openmp().GOMP_parallel(region, None, 0, 0)
    assert len(set(begun)) == another_openmp().omp_get_max_threads()
    layer = torch.nn.Conv2d(3, 8, 3)
    layer(torch.randn(8, 3, 64, 64)).sum().backward()


def set_in_torch(threads: int) -> int:
    import torch

    torch.set_num_threads(threads)
    return torch.get_num_threads()


def ends_late() -> int:
    """Return a result, then take more than a second to exit."""
    atexit.register(time.sleep, 1.5)
    return 42
