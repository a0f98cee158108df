"""Benchmarks of calls: isolation, gpu_mod, ranks, the trace. And options that no benchmark takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CALL_KEYS = ["call", "way", "weights_mb", "runs", "median_s", "min_s", "max_s", "caller_peak_mb"]

Figures = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.timeout(480)


def test_isolation_measures_ways_a_client_and_waiting_ones(figures: Figures) -> None:
    # One that imports torch for each call; of ours, a worker of the fork server, and a confined one.
    ways = ["in-process", "article", "ours-forkserver", "ours-guarded"]
    result = figures("isolation", "--quick", "--ways", ",".join(ways))
    rows = result["calls"]
    assert all(list(row) == CALL_KEYS for row in rows)
    for call in ("update", "return"):
        assert ways == [row["way"] for row in rows if row["call"] == call]
    for row in rows:
        assert (row["weights_mb"], row["runs"]) == (0.1, 1)
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["caller_peak_mb"] > 10

    imported = {row["way"]: row["torch_in_client"] for row in result["memory"]}
    assert imported == {"plain": False, "in-process": True, "ours-forkserver": False}
    assert all(row["clients"] == 2 and row["client_mb"] > 0 for row in result["memory"])
    processes = {row["way"]: row["processes"] for row in result["memory"]}
    assert processes["plain"] == processes["in-process"] == 2
    assert processes["ours-forkserver"] > 2  # the server is counted

    (row,) = result["client"]
    assert row["way"] == "in-process" and len(row["seconds"]) == 1

    assert [row["way"] for row in result["cudnn"]] == ["each worker", "fork server"]
    assert all(0 < row["load_min_s"] <= row["load_median_s"] <= row["load_max_s"] for row in result["cudnn"])


def test_wrong_values_end_the_benchmark(tmp_path: Path) -> None:
    """A way whose calls lose something must not get a figure."""
    shutil.copytree(
        BENCHMARKS, tmp_path / "benchmarks", ignore=shutil.ignore_patterns("results", "__pycache__")
    )
    tasks = tmp_path / "benchmarks" / "isolation" / "tasks.py"
    right = "np.add(array, 1, out=array)"
    assert right in tasks.read_text()
    tasks.write_text(tasks.read_text().replace(right, "np.add(array, 2, out=array)"))
    command = [sys.executable, "-m", "benchmarks.isolation", "--quick", "--only", "calls"]
    done = subprocess.run(
        [*command, "--ways", "in-process"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=450,
    )
    assert done.returncode == 1
    assert "array 0 has wrong values" in done.stderr
    assert "in-process" in done.stderr


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("isolation", ["--sizes", "0.01"], "not between"),
        ("isolation", ["--sizes", "big"], "not a number"),
        ("isolation", ["--ways", "article,magic"], "'magic' is not one of in-process"),
        ("isolation", ["--runs", "0"], "whole number"),
        ("isolation", ["--only", "all"], "not one of calls"),
        ("isolation", ["--json", "/nowhere/file.json"], "in none that exists"),
        ("leases", ["--processes=0"], "benchmarks.leases: argument"),
        ("leases", ["--seconds=-1"], "benchmarks.leases: argument"),
        ("leases", ["--waiters=many"], "benchmarks.leases: argument"),
        ("simulation", ["--engines", "spark"], "'spark' is not one of ours, ray, loop"),
        ("simulation", ["--epochs", "0"], "whole number"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    refused: Callable[..., tuple[int, str]], name: str, options: list[str], message: str
) -> None:
    status, said = refused(name, *options)
    assert status == 2
    assert message in said


def test_mod_measures_each_start_method(figures: Figures) -> None:
    result = figures("mod", "--quick", "--only", "direct")
    methods = [row["start_method"] for row in result["direct"]]
    assert methods == ["fork", "forkserver", "spawn", "forkserver, leased"]
    for row in result["direct"]:
        assert (row["weights_mb"], row["runs"]) == (0.1, 1)
        assert row["without_s"] > 0 and row["with_min_s"] <= row["with_s"] <= row["with_max_s"]
        assert row["added_s"] == pytest.approx(row["with_s"] - row["without_s"], abs=1e-5)
        assert row["ratio"] == pytest.approx(row["with_s"] / row["without_s"], rel=0.1, abs=0.01)


def test_tracing_compares_with_and_without(figures: Figures) -> None:
    [row] = figures("tracing", "--quick", "--only", "no-op")["rows"]
    # A start, the task's, a result and an end of each worker, and six lines of the run.
    assert (row["part"], row["clients"], row["lines"]) == ("no-op", 4, 4 * 4 + 6)
    assert row["on_s"] > 0 and row["off_s"] > 0 and row["line_us"] > 0


def test_ranks_are_measured_beside_the_plain_function(figures: Figures) -> None:
    result = figures("ranks", "--quick")
    assert [(row["way"], row["ranks"]) for row in result["start"]] == [("plain", 1), ("one", 1), ("ranks", 2)]
    assert [(row["way"], row["ranks"]) for row in result["train"]] == [
        ("plain", 1), ("one", 1), ("ddp", 2), ("fsdp", 2),
    ]  # fmt: skip
    assert all(row["call_s"] > row["step_s"] > 0 and row["runs"] == 1 for row in result["train"])
