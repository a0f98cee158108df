"""The benchmarks run, tiny, and write rows of the shape that is promised. No time is asserted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CALL_KEYS = ["call", "way", "weights_mb", "runs", "median_s", "min_s", "max_s", "caller_peak_mb"]

pytestmark = [
    pytest.mark.timeout(480),
    pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks read /proc"),
]


def run(script: str, *options: object, timeout_s: float = 450) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # tests run beside each other
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)


def figures(file: Path, script: str, *options: object) -> dict[str, Any]:
    done = run(script, "--json", file, *options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_isolation_measures_each_way(tmp_path: Path) -> None:
    ways = ["article", "executor", "loky", "ours-fork", "ours-forkserver"]  # others in the tests below
    options = "--quick", "--only", "calls", "--ways", ",".join(ways)
    result = figures(tmp_path / "figures.json", "isolation.py", *options)
    rows = result["calls"]
    assert all(list(row) == CALL_KEYS for row in rows)
    for call in ("update", "return"):
        assert ways == [row["way"] for row in rows if row["call"] == call]
    for row in rows:
        assert row["weights_mb"] == 0.1
        assert row["runs"] == 1
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["caller_peak_mb"] > 10
    assert result["machine"]["cpus"] >= 1
    assert {"python", "torch", "flwr", "kernel", "gpus"} <= result["machine"].keys()


def test_isolation_measures_a_client_and_waiting_ones(tmp_path: Path) -> None:
    options = "--quick", "--only", "client,memory", "--ways", "in-process,ours-forkserver"
    result = figures(tmp_path / "figures.json", "isolation.py", *options)
    assert result["calls"] == []
    assert [row["way"] for row in result["client"]] == ["in-process", "ours-forkserver"]
    assert all(len(row["seconds"]) == 1 for row in result["client"])
    torch = {row["way"]: row["torch_in_client"] for row in result["memory"]}
    assert torch == {"plain": False, "in-process": True, "ours-forkserver": False}
    assert all(row["clients"] == 2 for row in result["memory"])
    processes = {row["way"]: row["processes"] for row in result["memory"]}
    assert processes["plain"] == processes["in-process"] == 2
    assert processes["ours-forkserver"] > 2  # the server is counted
    assert all(row["client_mb"] > 0 for row in result["memory"])


def test_wrong_values_end_the_benchmark(tmp_path: Path) -> None:
    """A way whose calls lose something must not get a figure."""
    for file in BENCHMARKS.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    tasks = tmp_path / "tasks.py"
    text = tasks.read_text().replace("np.add(array, 1, out=array)", "np.add(array, 2, out=array)")
    tasks.write_text(text)
    command = [sys.executable, str(tmp_path / "isolation.py"), "--quick", "--only", "calls"]
    done = subprocess.run([*command, "--ways", "in-process"], capture_output=True, text=True, timeout=450)
    assert done.returncode == 1
    assert "array 0 has wrong values" in done.stderr
    assert "in-process" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes", "0.01"], "not between"),
        (["--sizes", "big"], "not a number"),
        (["--ways", "article,magic"], "'magic' is not one of in-process"),
        (["--runs", "0"], "whole number"),
        (["--only", "all"], "not one of calls"),
        (["--json", "/nowhere/file.json"], "in none that exists"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: list[str], message: str) -> None:
    done = run("isolation.py", *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_gpu_benchmark_cuts_a_call_into_parts(tmp_path: Path) -> None:
    """On the CPU: the same path, other figures."""
    options = "--device", "cpu", "--runs", 1, "--batch", 2, "--side", 32, "--ways", "spawn,ours-spawn"
    result = figures(tmp_path / "figures.json", "gpu.py", *options)
    assert result["device"] == "cpu"
    assert [row["way"] for row in result["steps"]] == ["spawn", "ours-spawn"]
    parts = "start", "context", "model", "first_step", "later_step", "exit", "total"
    for row in result["steps"]:
        assert list(row) == ["way", "runs", *(f"{part}_s" for part in parts)]
        assert all(row[f"{part}_s"] > 0 for part in parts)


def test_gpu_benchmark_says_that_there_is_no_gpu() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
        pytest.skip("there is one")
    except pynvml.NVMLError:
        pass
    done = run("gpu.py")
    assert done.returncode == 2
    assert "no NVIDIA GPU" in done.stderr


def test_gpu_benchmark_runs_all_of_its_parts_on_a_simulated_gpu(tmp_path: Path) -> None:
    result = figures(tmp_path / "figures.json", "gpu.py", "--device", "stub", "--quick")
    assert result["failed"] == {}
    article, ours = result["memory"]["ways"]
    assert (ours["trained"], ours["out_of_memory"]) == (3, 0) and article["out_of_memory"] == 1
    leases, bare = result["oversubscribe"]["ways"]
    assert (leases["finished"], leases["out_of_memory_in_workers"]) == (6, 0) and bare["out_of_memory"] > 0
    assert leases["most_at_a_time"] <= result["oversubscribe"]["fit"]
    assert result["cap"]["greedy"]["error"] == "GPUOutOfMemoryError" and result["cap"]["neighbour"]["same"]
    ways = [(row["way"], row["concurrency"]) for row in result["throughput"]["rows"]]
    assert sorted(ways) == [("article", 1), ("article", 2), ("ours", 1), ("ours", 2)]


def test_clients_that_nobody_has_sized_fill_a_gpu_and_none_runs_out(tmp_path: Path) -> None:
    result = figures(tmp_path / "figures.json", "footprint.py", "--clients", 12, "--seconds", 0.3)
    assert (result["finished"], result["out_of_memory"]) == (12, 0)
    assert (result["calls_alone"], result["most_at_a_time"]) == (1, 5)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_mod_measures_each_start_method_and_a_simulation(tmp_path: Path) -> None:
    result = figures(tmp_path / "figures.json", "mod.py", "--quick")
    methods = [row["start_method"] for row in result["direct"]]
    assert methods == ["fork", "forkserver", "spawn", "forkserver, leased"]
    (simulated,) = result["ray"]
    assert (simulated["clients"], simulated["rounds"], simulated["actors"]) == (2, 1, 2)
    for row in [*result["direct"], simulated]:
        assert (row["weights_mb"], row["runs"]) == (0.1, 1)
        assert row["without_s"] > 0 and row["with_min_s"] <= row["with_s"] <= row["with_max_s"]
        assert row["added_s"] == pytest.approx(row["with_s"] - row["without_s"], abs=1e-5)
        assert row["ratio"] == pytest.approx(row["with_s"] / row["without_s"], rel=0.1, abs=0.01)


def test_supernode(tmp_path: Path) -> None:
    options = ("--only", "no-op", "--supernodes", "2", "--rounds", "1", "--runs", "1")
    rows = figures(tmp_path / "figures.json", "supernode.py", *options)["rows"]
    assert [(row["app"], row["way"], row["supernodes"]) for row in rows] == [
        ("no-op", "flower", 2),
        ("no-op", "ours", 2),
    ]
    assert all(row["total_s"] > 0 and row["cpu_s_per_message"] > 0 for row in rows)


def test_tracing_compares_with_and_without(tmp_path: Path) -> None:
    result = figures(tmp_path / "figures.json", "tracing.py", "--quick", "--only", "no-op")
    [row] = result["rows"]
    # A start, a result and an end of each worker, and five lines of the run.
    assert (row["part"], row["clients"], row["lines"]) == ("no-op", 4, 3 * 4 + 5)
    assert row["on_s"] > 0 and row["off_s"] > 0 and row["line_us"] > 0


def test_ranks_are_measured_beside_the_plain_function(tmp_path: Path) -> None:
    result = figures(tmp_path / "figures.json", "ranks.py", "--quick")
    assert [(row["way"], row["ranks"]) for row in result["start"]] == [("plain", 1), ("one", 1), ("ranks", 2)]
    assert [(row["way"], row["ranks"]) for row in result["train"]] == [
        ("plain", 1), ("one", 1), ("ddp", 2), ("fsdp", 2),
    ]  # fmt: skip
    assert all(row["call_s"] > row["step_s"] > 0 and row["runs"] == 1 for row in result["train"])
