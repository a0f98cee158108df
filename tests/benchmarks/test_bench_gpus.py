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
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "no NVIDIA GPU" in done.stderr


@pytest.fixture
def stand_in(cuda_host: Callable[..., Host], tmp_path: Path) -> dict[str, str]:
    """Variables of a host with a card that PyTorch can use, and a ledger of its own."""
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    return {**cuda_host(gpus=1, total=16 * GIB, driver="615.20.01").env, "FLOWER_GPU_LEDGER_DIR": str(ledger)}


def test_the_gpu_benchmark_runs_and_draws(figures: Figures, stand_in: dict[str, str], tmp_path: Path) -> None:
    """One of its parts. The others run in the rehearsal of host.sh, by hand."""
    picture = tmp_path / "gpu.png"
    options = "--model", "elementwise", "--quick", "--runs", 1, "--plot", picture
    cap = figures("gpu", *options, "--only", "cap", env=stand_in)["cap"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cap["greedy"]["error"] == "GPUOutOfMemoryError" and cap["neighbour"]["same"]
    around = cap["asks_cuda_itself"]
    assert around["answer"] if around["cap"] == "driver" else around["cap"] == "allocator"


# host.sh ---------------------------------------------------------------------------------------------------

HOST = REPOSITORY / "benchmarks" / "gpu" / "host.sh"


def host_sh(
    out: Path, *options: str, python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    command = ["bash", HOST, out, "--python", python, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_a_host_on_which_all_gpu_tests_are_skipped_has_failed(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 1 skipped in 0.1s\n")
    python.chmod(0o755)
    done = host_sh(tmp_path / "out", "tests", python=python)
    assert (done.returncode, "no test has passed" in done.stderr) == (1, True)


def test_a_rehearsal_of_a_host(cuda_host: Callable[..., Host], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = host_sh(out, "--stand-in", "facts")
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
