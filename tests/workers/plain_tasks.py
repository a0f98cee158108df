"""Tasks that return values, show progress or log."""

from __future__ import annotations

import concurrent.futures
import logging
import multiprocessing
import os
import sys
import threading
import time
from typing import Any

import flower_gpu

pool: Any = None


class Table:
    """An object that holds an array of objects, as a data frame does."""

    def __init__(self) -> None:
        import numpy as np

        self.columns = np.array(["a", 1, None], dtype=object)


def answer() -> int:
    return 42


def square(number: int) -> int:
    return number * number


def squares_of_pools() -> list[list[int]]:
    """Compute squares in pools of all of multiprocessing's start methods."""
    results = []
    for method in ("fork", "forkserver", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            results.append(pool.map(square, range(4)))
    return results


def echo(*args: Any, **kwargs: Any) -> Any:
    return args if not kwargs else (args, kwargs)


def pid() -> int:
    return os.getpid()


def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def path_and_process() -> dict[str, Any]:
    return {"path": list(sys.path), "group": os.getpgrp(), "pid": os.getpid()}


def never_ends_its_thread() -> int:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return 42


def keeps_a_pool() -> int:
    """Leave a process pool in a global variable. It is closed at exit, as in any program."""
    global pool
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    return pool.submit(square, 7).result()


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


def log(with_flower: bool = False) -> None:
    """Log to stderr with each kind of logger, once each."""
    if with_flower:
        import flwr.common.logger  # noqa: F401
    for name in ("flwr", "flwr.flower_gpu", "flower_gpu", "my.own", "flwr.my.own", ""):
        logging.getLogger(name).warning("of %r: %d %%", name, 5)
    logging.getLogger("flwr").warning("100 %")
    logging.getLogger("flwr").warning({"a": 1})
    logging.getLogger("flwr").warning("")


def log_in_a_nested_worker() -> None:
    flower_gpu.run_in_worker("plain_tasks:log", start_method="spawn")


class Unreadable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def log_an_object_without_text() -> str:
    logging.raiseExceptions = False
    logging.getLogger("flwr").warning(Unreadable())
    return "went on"


def filters() -> dict[str, Any]:
    return {name: len(logging.getLogger(name).filters) for name in ("flwr", "flwr.flower_gpu")}


def value_of(thing: Any) -> Any:
    return thing.value
