"""Tasks that return something."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from typing import Any

import flower_gpu


class Table:
    """Something that has its own use for an array of objects, as a data frame has."""

    def __init__(self) -> None:
        import numpy as np

        self.columns = np.array(["a", 1, None], dtype=object)


def answer() -> int:
    return 42


def square(number: int) -> int:
    return number * number


def squares_of_pools() -> list[list[int]]:
    """Ask processes of a pool, started in each way that there is."""
    found = []
    for method in ("fork", "forkserver", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            found.append(pool.map(square, range(4)))
    return found


def echo(*args: Any, **kwargs: Any) -> Any:
    return args if not kwargs else (args, kwargs)


def pid() -> int:
    return os.getpid()


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def where() -> dict[str, Any]:
    return {"path": list(sys.path), "group": os.getpgrp(), "pid": os.getpid()}


def never_ends_its_thread() -> int:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return 42


def never_ends_at_exit() -> int:
    import atexit

    atexit.register(time.sleep, 600)
    return 42


def count(items: int, desc: str = "") -> float:
    began = time.monotonic()
    for _ in flower_gpu.progress(range(items), desc=desc):
        pass
    return time.monotonic() - began


def count_without_length(items: int) -> int:
    return sum(1 for _ in flower_gpu.progress((n for n in range(items)), desc="stream"))


def count_in_many_ways() -> None:
    import numpy as np

    for items, desc in enumerate(("none", "one", "two")):
        count(items, desc)
    count_without_length(7)
    for _ in flower_gpu.progress(iter(range(3)), "numpy", total=np.int64(3)):  # type: ignore[arg-type]
        pass
    thread = threading.Thread(target=count, args=(5, "thread"))
    thread.start()
    thread.join()
