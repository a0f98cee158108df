"""Benchmarks of GPUs and their leases, on cards that are not there: what they promise holds here, too."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_stub import Host

REPOSITORY = Path(__file__).parents[2]
GIB = 2**30

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
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    assert done.returncode == 2
    assert "no NVIDIA GPU" in done.stderr


@pytest.fixture
def stand_in(cuda_host: Callable[..., Host], tmp_path: Path) -> dict[str, str]:
    """Variables of a host with a card that PyTorch can use, and a ledger of its own."""
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    return {**cuda_host(gpus=1, total=16 * GIB).env, "FLOWER_GPU_LEDGER_DIR": str(ledger)}


def test_the_gpu_benchmark_runs_and_draws_its_parts(
    figures: Figures, stand_in: dict[str, str], tmp_path: Path
) -> None:
    picture = tmp_path / "gpu.png"
    options = "--model", "elementwise", "--quick", "--runs", 1, "--ways", "ours-spawn", "--plot", picture
    parts = "cap,oversubscribe,steps,memory,throughput"
    result = figures("gpu", *options, "--only", parts, env=stand_in)
    assert picture.read_bytes().startswith(b"\x89PNG")
    [row] = result["steps"]
    steps = "start", "context", "model", "first_step", "later_step", "exit", "total"
    assert list(row) == ["way", "runs", *(f"{part}_s" for part in steps)]
    assert row["way"] == "ours-spawn" and all(row[f"{part}_s"] > 0 for part in steps)
    article, ours = result["memory"]["ways"]
    assert (article["trained"], ours["trained"]) == (2, 2)
    assert article["kept_per_client_mb"] > 400 and ours["back_at_start"]  # contexts
    leases, bare = result["oversubscribe"]["ways"]
    assert (leases["finished"], leases["out_of_memory_in_workers"]) == (4, 0)
    assert leases["most_at_a_time"] <= result["oversubscribe"]["fit"]
    assert bare["other_failures"] == 0 and bare["finished"] + bare["out_of_memory"] == 4
    assert result["cap"]["greedy"]["error"] == "GPUOutOfMemoryError" and result["cap"]["neighbour"]["same"]
    ways = [(row["way"], row["concurrency"]) for row in result["throughput"]["rows"]]
    assert sorted(ways) == [("article", 2), ("ours", 2)]


def test_an_app_is_tried_on_the_gpu_and_confined(figures: Figures, stand_in: dict[str, str]) -> None:
    options = "--model", "elementwise", "--quick", "--only", "example"
    (row,) = figures("gpu", *options, env=stand_in)["example"]["ways"]
    assert row["status"] == 0 and row["calls_on_a_gpu"] >= 6 and row["said"] == "", row


def test_simulations_beside_a_loop_on_the_gpu(figures: Figures, stand_in: dict[str, str]) -> None:
    options = "--only", "resnet", "--model", "elementwise", "--quick", "--engines", "ours,loop"
    rows = figures("simulation", *options, env=stand_in)["resnet"]
    calls = [(row["way"], row["calls_per_worker"]) for row in rows]
    assert calls == [("loop", None), ("ours", None)]
    assert all(row["rounds"] == 2 and len(row["all_rounds_s"][0]) == 2 for row in rows)


# host.sh ---------------------------------------------------------------------------------------------------

HOST = REPOSITORY / "benchmarks" / "gpu" / "host.sh"


def host_sh(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", HOST, out, "--python", sys.executable, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_a_host_on_which_all_gpu_tests_are_skipped_has_failed(tmp_path: Path) -> None:
    done = host_sh(tmp_path / "out", "tests", "-k", "test_each_worker_sees_its_own_gpu_only")
    skipped = "1 skipped" in (tmp_path / "out" / "tests.log").read_text()
    if not skipped:
        pytest.skip("there is a GPU")
    assert (done.returncode, "no test has passed" in done.stderr) == (1, True)


def test_a_rehearsal_of_a_host(cuda_host: Callable[..., Host], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = host_sh(out, "--stand-in", "facts", "tests", "-k", "test_each_worker_sees_its_own_gpu_only")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = (out / "facts.log").read_text()
    assert "Landlock: version" in facts and "1 of 1 usable" in facts and " driver " in facts
    assert host_sh(out, "tests", "--wheel").returncode == 2


def test_wheels_are_packed_without_what_is_not_needed(tmp_path: Path) -> None:
    from benchmarks.gpu import wheels

    wheel, smaller = tmp_path / "ray-1-py3-none-any.whl", tmp_path / "smaller.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("ray/__init__.py", "ray/jars/large.jar"):
            file.writestr(name, name)
        file.writestr("ray-1.dist-info/RECORD", "ray/__init__.py,,\nray/jars/large.jar,,\n")
    wheels.pack(wheel, smaller, ("ray/jars/",))
    with zipfile.ZipFile(smaller) as file:
        assert file.namelist() == ["ray/__init__.py", "ray-1.dist-info/RECORD"]
        assert file.read("ray-1.dist-info/RECORD") == b"ray/__init__.py,,\n"
        assert file.testzip() is None


def test_clients_that_nobody_has_sized_fill_a_gpu_and_none_runs_out(figures: Figures) -> None:
    result = figures("footprint", "--clients", 7, "--seconds", 0.3)
    assert (result["finished"], result["out_of_memory"]) == (7, 0)
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
