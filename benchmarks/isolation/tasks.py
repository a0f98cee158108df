"""The work of the calls, in a module that imports what a client's module imports.

Every way runs these functions. They also return the process that ran them, so that a caller can wait until
it is gone.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.shared.member import LIBRARY
from benchmarks.shared.weights import Weights

import_module(LIBRARY)  # as a client's module does; each new process pays for it


def update(weights: Weights) -> tuple[int, Weights]:
    """Change every array in place, as an optimizer does."""
    for array in weights:
        np.add(array, 1, out=array)
    return os.getpid(), weights


def untouched(weights: Weights) -> tuple[int, Weights]:
    return os.getpid(), weights


CALLS = {"update": update, "return": untouched}


def into_dict(call: str, weights: Weights, results: MutableMapping[str, Any]) -> None:
    """Leave the result in the dictionary of a Manager."""
    pid, weights = CALLS[call](weights)
    results["pid"] = pid
    results["weights"] = weights


def into_pipe(call: str, weights: Weights, connection: Connection) -> None:
    connection.send(CALLS[call](weights))
    connection.close()


def fit(weights: Weights, config: dict[str, Any]) -> tuple[Weights, int, dict[str, Any]]:
    """Do an update as ``fit`` of a NumPyClient."""
    return update(weights)[1], 1, {}
