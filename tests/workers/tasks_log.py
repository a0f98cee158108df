"""Tasks that log."""

from __future__ import annotations

import logging
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


def log_in_a_worker_of_this_one() -> None:
    flower_gpu.run_in_worker("tasks_log:log", start_method="spawn")


class Unreadable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def log_what_has_no_text() -> str:
    logging.raiseExceptions = False
    logging.getLogger("flwr").warning(Unreadable())
    return "went on"


def filters() -> dict[str, Any]:
    return {name: len(logging.getLogger(name).filters) for name in ("flwr", "flwr.flower_gpu")}
