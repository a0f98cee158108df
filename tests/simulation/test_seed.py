"""``seed`` decides every random number of the ServerApp: the same command gives the same initial model."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

# No message is sent to clients, so no worker starts. PyTorch is imported within `main`, as in many apps.
SCRIPT = """
import random
import sys

import numpy as np
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_gpu import simulate

server = ServerApp()


@server.main()
def main(grid, context):
    was_imported = "torch" in sys.modules
    import torch

    print(torch.randn(3).tolist(), np.random.rand(), random.random(), was_imported)


simulate((server, ClientApp()), 2, seed=int(sys.argv[1]), log_dir=None, progress=False)
simulate((server, ClientApp()), 2, seed=int(sys.argv[1]), log_dir=None, progress=False)
"""


def drawn(seed: int) -> list[tuple[str, bool]]:
    """Return the numbers drawn by two runs of a process, and whether PyTorch was imported before each."""
    command = [sys.executable, "-c", SCRIPT, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    return [(numbers, was_imported == "True") for numbers, was_imported in lines]


def test_the_same_seed_gives_the_same_random_numbers_of_the_server() -> None:
    (first, first_imported), (second, second_imported) = drawn(7)
    assert (first_imported, second_imported) == (False, True)
    assert first == second == drawn(7)[0][0]
    assert drawn(8)[0][0] != first
