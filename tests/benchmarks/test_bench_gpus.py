"""Benchmarks of GPUs and leases, on stand-ins for GPUs. Their guarantees hold here, too."""

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


def test_the_gpu_benchmark_reports_a_missing_gpu() -> None:
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
        pytest.skip("this host has a GPU")
    except pynvml.NVMLError:
        pass
    command = [sys.executable, "-m", "benchmarks.gpu"]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert process.returncode == 2 and "no NVIDIA GPU" in process.stderr


@pytest.fixture
def stand_in(cuda_host: Callable[..., Host]) -> dict[str, str]:
    """Variables of a host with a simulated GPU that PyTorch can use, and with its own ledger."""
    return cuda_host(gpus=1, total=16 * GIB, driver="615.20.01").env


def test_the_gpu_benchmark_runs_on_a_stand_in(figures: Figures, stand_in: dict[str, str]) -> None:
    """This runs one part of the benchmark. The other parts run by hand, in the rehearsal of host.sh."""
    options = "--model", "elementwise", "--quick", "--runs", 1, "--only", "cap"
    cap = figures("gpu", *options, env=stand_in)["cap"]
    assert cap["greedy"]["error"] == "GPUOutOfMemoryError" and cap["neighbor"]["same"]
    direct = cap["cuda_malloc"]
    assert direct["answer"] if direct["cap"] == "driver" else direct["cap"] == "allocator"


# host.sh ---------------------------------------------------------------------------------------------------

HOST = REPOSITORY / "benchmarks" / "gpu" / "host.sh"


def host_sh(
    out: Path, *options: str, python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    command = ["bash", HOST, out, "--python", python, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_host_sh_fails_if_all_gpu_tests_are_skipped(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 1 skipped in 0.1s\n")
    python.chmod(0o755)
    process = host_sh(tmp_path / "out", "tests", python=python)
    assert (process.returncode, "no test has passed" in process.stderr) == (1, True)


def test_host_sh_can_be_rehearsed_on_a_stand_in(cuda_host: Callable[..., Host], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = host_sh(out, "--stand-in", "facts")
    assert process.returncode == 0, process.stdout + process.stderr
    facts = (out / "facts.log").read_text()
    assert "Landlock: version" in facts and "1 of 1 usable" in facts and " driver " in facts
    assert host_sh(out, "tests", "--wheel").returncode == 2


def test_wheels_are_packed_without_unneeded_files(tmp_path: Path) -> None:
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


def test_leases_never_exceed_the_capacity_while_processes_are_killed(figures: Figures) -> None:
    options = {"processes": 48, "waiters": 12, "seconds": 1, "runs": 20}
    result = figures("leases", *(f"--{name}={value}" for name, value in options.items()))
    crowd, waiting = result["crowd"], result["waiting"]
    details = f"with --seed {result['seed']}: {result}"
    assert crowd["over_capacity_instants"] == crowd["over_used_instants"] == 0, details
    assert crowd["seen_twice"] == crowd["unfinished"] == crowd["left_over"] == 0, details
    assert 0 < crowd["peak_leased_bytes"] <= crowd["capacity_bytes"], details
    assert (crowd["finished"], crowd["killed"]) == (32, 16), details
    assert crowd["peak_waiting"] > 0, details
    assert crowd["observations"] > 20, details
    assert result["alone"]["acquire_release_median_ms"] > 0
    assert waiting["waiter_cpu_s_per_minute"] > 0
    # One of the 12 waiters was killed.
    assert waiting["drained"] == 11, details
