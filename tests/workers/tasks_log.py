"""Tasks that log."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import flower_gpu


def log(with_flower: bool = False) -> None:
    """Log with every logger that may be told apart, on stderr and once each."""
    if with_flower:
        import flwr.common.logger  # noqa: F401
    for name in ("flwr", "flwr.flower_gpu", "flower_gpu", "my.own", "flwr.my.own", ""):
        logging.getLogger(name).warning("of %r: %d %%", name, 5)
    logging.getLogger("flwr").warning("100 %")
    logging.getLogger("flwr").warning({"a": 1})
    logging.getLogger("flwr").warning("")


def libraries() -> list[str]:
    return [name for name in ("flwr", "torch") if name in sys.modules]


def log_in_a_worker_of_this_one() -> None:
    flower_gpu.run_in_worker("tasks_log:log", start_method="spawn")


class Unreadable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def log_what_has_no_text() -> str:
    logging.raiseExceptions = False
    logging.getLogger("flwr").warning(Unreadable())
    return "went on"


def seconds_of_beginning(times: int) -> list[float]:
    """Return how long each of so many beginnings with another prefix took; the first one adds the filters."""
    from flower_gpu.workers import events

    events.begin_log_lines("")
    found: list[float] = []
    for number in range(times):
        began = time.perf_counter()
        events.begin_log_lines(f"client {number}, round 1: ")
        found.append(time.perf_counter() - began)
    return found


def filters() -> dict[str, Any]:
    return {name: len(logging.getLogger(name).filters) for name in ("flwr", "flwr.flower_gpu")}
