"""Apps of all shapes that people publish run unchanged: Flower's own runtime prints the same of each.

The exact figures are those of `flwr.simulation.run_simulation`; the others depend on the order of replies
or on noise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

SHAPES = Path(__file__).parent / "shapes"


def printed_by(shape: str, log_dir: Path) -> list[dict[str, Any]]:
    """Run the app with four clients. Return the results that it prints."""
    command = [sys.executable, "-m", "flower_gpu.cli", "simulate", str(SHAPES / shape)]
    done = subprocess.run(
        [*command, "--num-supernodes", "4", "--seed", "1", "--log-dir", str(log_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        # Lightning writes into the working directory.
        cwd=log_dir,
        # An editable installation of an app does the same.
        env={**os.environ, "PYTHONPATH": str(SHAPES / shape / "src")},
    )
    assert done.returncode == 0, done.stdout
    return [
        json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]


def test_an_own_loop_with_five_kinds_of_messages(tmp_path: Path) -> None:
    (printed,) = printed_by("own_loop", tmp_path)
    assert printed == {
        "partitions": [0, 1, 2, 3],
        "moments": [1.534934, 1.459416],
        "kept": 4,
        "center": 1.0,
        "failed": 1,
        "losses": [1.0, 1.0, 1.0],
    }


def test_an_app_in_src_sends_trees_as_bytes(tmp_path: Path) -> None:
    (printed,) = printed_by("xgboost_bagging", tmp_path)
    assert len(printed["accuracies"]) == 2 and min(printed["accuracies"]) > 0.8


def test_lightning_with_its_own_trainer_and_checkpoints(tmp_path: Path) -> None:
    (printed,) = printed_by("lightning_module", tmp_path)
    assert printed["accuracy"] > 0.85


def test_opacus_with_the_spent_privacy_in_the_state(tmp_path: Path) -> None:
    (printed,) = printed_by("private_engine", tmp_path)
    assert printed["epsilons"] == pytest.approx([5.89, 7.29], abs=0.02)
    assert printed["accuracy"] > 0.7
