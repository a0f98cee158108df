"""The benchmark simulation.py runs, tiny, and gives right answers in the promised shape."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from test_benchmarks import figures, run

HAS_RAY = importlib.util.find_spec("ray") is not None
SIZE = ["engine", "clients", "rounds", "model_mb"]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks read /proc"),
    pytest.mark.timeout(200),
]


def quick(tmp_path: Path, *options: str) -> dict[str, Any]:
    return figures(tmp_path / "figures.json", "simulation.py", "--quick", *options)


def test_ours_gives_every_client_its_message_and_the_memory_of_its_tree(tmp_path: Path) -> None:
    """That all clients answered, and that the model is right, the app itself checks."""
    result = quick(tmp_path, "--only", "no-op,many", "--engines", "ours")
    assert {"cpus", "flwr", "ray"} <= result["machine"].keys()
    (row,) = result["no-op"]
    assert [row[name] for name in SIZE] == ["ours", 6, 2, 0.1]
    assert row["all_total_s"] == [row["total_s"]] and 0 < row["round_s"] < row["total_s"]
    assert row["per_message_ms"] == pytest.approx(row["round_s"] / 6 * 1000, abs=2)
    (many,) = result["many"]
    assert [many[name] for name in SIZE] == ["ours", 40, 1, 1.0]
    moments = [many[f"mb_at_{share}_percent"] for share in (10, 50, 90)]
    assert 20 < min(moments) <= max(moments) <= many["peak_tree_mb"]


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
def test_ours_and_ray_are_compared(tmp_path: Path) -> None:
    result = quick(tmp_path, "--only", "no-op", "--engines", "ours,ray")
    ours, ray = result["no-op"]
    assert [ours["engine"], ray["engine"]] == ["ours", "ray"]
    (ratio,) = result["no-op-ratios"]
    assert ratio["faster"] == pytest.approx(ray["total_s"] / ours["total_s"], abs=0.01)
    assert ratio["memory"] == pytest.approx(ours["peak_tree_mb"] / ray["peak_tree_mb"], abs=0.01)


def test_training_gives_the_model_of_a_plain_loop(tmp_path: Path) -> None:
    rows = quick(tmp_path, "--only", "digits", "--engines", "ours,loop", "--epochs", "1")["digits"]
    assert [(row["engine"], row["calls_per_worker"], row["preload"]) for row in rows] == [
        ("ours", 1, True),
        ("ours", 1, False),
        ("ours", 1000, False),
        ("loop", None, False),
    ]
    assert all(row["weights_differ_by"] < 1e-4 and row["accuracy"] > 0.5 for row in rows)
    assert all(row["total_to_ideal"] > 0 and row["round_to_ideal"] > 0 for row in rows)


def test_training_on_few_of_the_clients_gives_a_model(tmp_path: Path) -> None:
    (row,) = quick(tmp_path, "--only", "accuracy", "--engines", "ours")["accuracy"]
    names = ("engine", "seed", "clients", "clients_per_round", "rounds", "alpha")
    assert [row[name] for name in names] == ["ours", 0, 4, 2, 1, 0.3]
    assert row["accuracy"] > 0.3


def test_clients_that_fail_are_named(tmp_path: Path) -> None:
    rows = quick(tmp_path, "--only", "failures")["failures"]
    assert {row["failure"]: row["named"] for row in rows} == {"raise": [[0, 3]], "kill": [[1]], "hang": [[2]]}
    assert all(row["outcome"].startswith("completed, ") and row["model_is_right"] for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "all"], "'all' is not one of no-op, many"),
        (["--engines", "spark"], "'spark' is not one of ours, ray, loop"),
        (["--epochs", "0"], "whole number"),
    ],
)
def test_options_of_the_simulation_that_cannot_be_used_are_refused(options: list[str], message: str) -> None:
    done = run("simulation.py", *options, timeout_s=60)
    assert done.returncode == 2
    assert message in done.stderr
