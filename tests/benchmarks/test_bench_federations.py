"""Benchmarks of SuperNodes and of simulations."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest

NO_NETWORK = os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter", "taskset")))
HAS_RAY = importlib.util.find_spec("ray") is not None
SIZE = ["engine", "clients", "rounds", "model_mb"]

Figures = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.timeout(480)


def test_supernode_measures_a_message(figures: Figures) -> None:
    """The benchmark itself checks that all clients have replied."""
    [row] = figures("supernode", "--quick", "--only", "no-op", "--ways", "ours")["rows"]
    assert (row["app"], row["way"], row["supernodes"]) == ("no-op", "ours", 1)
    assert 0 < row["round_s"] <= row["strategy_s"] < row["total_s"] <= row["whole_s"]
    assert row["cpu_s_per_message"] > 0


def test_simulation_measures_each_engine(figures: Figures) -> None:
    """The apps themselves check that all clients have replied and that the model is correct."""
    result = figures("simulation", "--quick", "--only", "no-op,order,batches", "--engines", "ours")

    [ours] = result["no-op"]
    assert [ours[name] for name in SIZE] == ["ours", 6, 2, 0.1]
    assert ours["all_total_s"] == [ours["total_s"]] and 0 < ours["round_s"] < ours["total_s"]
    assert ours["per_message_ms"] == pytest.approx(ours["round_s"] / 6 * 1000, abs=2)

    row, medians = result["order"]
    assert [row[name] for name in ("clients", "workers", "rounds")] == [8, 2, 1]
    assert medians == {**row, "seed": None}
    assert min(row["longest_s"], row["sent_s"]) > row["sleep_s"] > 0 and row["over_bound"] > 0
    assert row["shorter"] == pytest.approx(1 - row["longest_s"] / row["sent_s"], abs=0.01)

    ways = result["batches"]
    assert [(row["network"], row["way"]) for row in ways] == [("mlp", "one"), ("mlp", "many")]
    assert all(row["weights_differ_by"] <= 1e-5 and row["task_cpu_s"] > 0 for row in ways)
    assert ways[0]["batches"][0]["fastest"] == {} and ways[1]["batches"][0]["fastest"] == {"train": 1}


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed")
@pytest.mark.skipif(NO_NETWORK, reason="needs root, and ip: hosts have network interfaces")
def test_cluster_counts_the_bytes_between_two_hosts(figures: Figures) -> None:
    """The app itself checks that all clients have replied and that the model is correct."""
    (wire,) = figures("cluster", "--quick", "--only", "wire")["wire"]
    # On a busy machine, the other host may handle all messages of a round.
    assert wire["up_bytes"] * wire["rounds"] > wire["sum_bytes"] == 2 * wire["model_bytes"]
    assert wire["down_bytes"] > 0
    assert wire["driver_peak_rss_mb"] > 20 and wire["agent_peak_rss_mb"] > 20
