"""Benchmarks of GPUs and their leases, on stub GPUs: what they promise holds here, too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Figures = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.timeout(480)


def test_the_gpu_benchmark_says_that_there_is_no_gpu() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
        pytest.skip("there is one")
    except pynvml.NVMLError:
        pass
    command = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=400)
    assert done.returncode == 2
    assert "no NVIDIA GPU" in done.stderr


def test_the_gpu_benchmark_runs_and_draws_all_of_its_parts_on_a_simulated_gpu(
    figures: Figures, tmp_path: Path
) -> None:
    picture = tmp_path / "gpu.png"
    options = "--device", "stub", "--quick", "--runs", 1, "--ways", "ours-spawn", "--plot", picture
    result = figures("gpu", *options)
    assert picture.read_bytes().startswith(b"\x89PNG")
    [row] = result["steps"]
    parts = "start", "context", "model", "first_step", "later_step", "exit", "total"
    assert list(row) == ["way", "runs", *(f"{part}_s" for part in parts)]
    assert row["way"] == "ours-spawn" and all(row[f"{part}_s"] > 0 for part in parts)
    article, ours = result["memory"]["ways"]
    assert (ours["trained"], ours["out_of_memory"]) == (3, 0) and article["out_of_memory"] == 1
    leases, bare = result["oversubscribe"]["ways"]
    assert (leases["finished"], leases["out_of_memory_in_workers"]) == (6, 0) and bare["out_of_memory"] > 0
    assert leases["most_at_a_time"] <= result["oversubscribe"]["fit"]
    assert result["cap"]["greedy"]["error"] == "GPUOutOfMemoryError" and result["cap"]["neighbour"]["same"]
    ways = [(row["way"], row["concurrency"]) for row in result["throughput"]["rows"]]
    assert sorted(ways) == [("article", 1), ("article", 2), ("ours", 1), ("ours", 2)]


def test_clients_that_nobody_has_sized_fill_a_gpu_and_none_runs_out(figures: Figures) -> None:
    result = figures("footprint", "--clients", 9, "--seconds", 0.3)
    assert (result["finished"], result["out_of_memory"]) == (9, 0)
    assert (result["calls_alone"], result["most_at_a_time"]) == (1, 5)


def test_a_crowd_of_which_a_third_is_killed_never_has_more_than_there_is(figures: Figures) -> None:
    options = {"processes": 48, "waiters": 12, "seconds": 1, "runs": 20}
    result = figures("leases", *(f"--{name}={value}" for name, value in options.items()))
    told = f"with --seed {result['seed']}: {result}"
    assert result["over_capacity_instants"] == result["over_used_instants"] == 0, told
    assert result["seen_twice"] == result["unfinished"] == result["left_over"] == 0, told
    assert 0 < result["peak_leased_bytes"] <= result["capacity_bytes"], told
    assert (result["finished"], result["killed"]) == (32, 16), told
    assert result["peak_waiting"] > 0, told
    assert result["observations"] > 20, told
    assert result["acquire_release_median_ms"] > 0
    assert result["waiter_cpu_s_per_minute"] > 0
    assert result["drained"] == 11, told  # all but the one that was killed
