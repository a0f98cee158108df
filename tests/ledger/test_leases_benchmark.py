"""The benchmark of leases runs, tiny, and what it promises holds. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "leases.py"


@pytest.mark.timeout(150)
def test_a_crowd_of_which_a_third_is_killed_never_has_more_than_there_is(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = {"processes": 48, "waiters": 12, "seconds": 1, "runs": 20, "json": file}
    command = [sys.executable, str(BENCHMARK), *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    figures = json.loads(file.read_text())
    told = f"with --seed {figures['seed']}: {figures}"
    assert figures["over_capacity_instants"] == figures["over_used_instants"] == 0, told
    assert figures["seen_twice"] == figures["unfinished"] == figures["left_over"] == 0, told
    assert 0 < figures["peak_leased_bytes"] <= figures["capacity_bytes"], told
    assert (figures["finished"], figures["killed"]) == (32, 16), told
    assert figures["peak_waiting"] > 0, told
    assert figures["observations"] > 20, told
    assert figures["acquire_release_median_ms"] > 0
    assert figures["waiter_cpu_s_per_minute"] > 0
    assert figures["drained"] == 11, told  # all but the one that was killed


@pytest.mark.parametrize(
    "option", ["--processes=0", "--seconds=-1", "--waiters=many", "--json=/nowhere/file"]
)
def test_options_of_the_benchmark_that_cannot_be_used_are_refused(option: str) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), option], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "leases.py: argument" in done.stderr
