"""A call that is to run in a process that has started CUDA has the device in use, not that of its lease."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvml_stub import GIB, Host
from workers.test_choose import driver as driver

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
    import ctypes, os, sys
    from flower_gpu import run_in_worker
    driver, uuid = sys.argv[1:]
    cuda = ctypes.CDLL(driver)
    cuda.cuInit(1)
    if uuid:  # older drivers do not tell
        cuda.be(bytes.fromhex(uuid.partition("-")[2].replace("-", "")))
    here = run_in_worker(os.getpid, gpu_memory="2GiB", start_method="in-process") == os.getpid()
    print("here" if here else "in a worker")
"""


@pytest.fixture
def run(tmp_path: Path, driver: str, run_script: Callable[..., Any]) -> Callable[..., Any]:
    """Run a call in a process whose CUDA has started on a device."""

    def run(host: Host, uuid: str) -> Any:
        ledger = tmp_path / "ledger"
        ledger.mkdir()
        env = {
            **host.env,
            "FLOWER_GPU_LEDGER_DIR": str(ledger),
            "FLOWER_GPU_STATE_DIR": str(tmp_path / "state"),
        }
        return run_script(SCRIPT, driver, uuid, env=env)

    return run


@pytest.mark.parametrize(("in_use", "is_told"), [("leased", False), ("other", True), ("unknown", False)])
def test_mig_devices(in_use: str, is_told: bool, tmp_path: Path, run: Callable[..., Any]) -> None:
    """CUDA counts one device, with however many MIG devices; the lease goes to the one with most room."""
    host = Host(tmp_path / "host", gpus=1)
    small, large = host.mig(0, [4 * GIB, 8 * GIB])
    done = run(host, {"leased": large, "other": small, "unknown": ""}[in_use])
    assert done.stdout == "here\n"
    assert ("not on its lease's" in done.stderr) == is_told


@pytest.mark.parametrize(("number", "is_told"), [(0, True), (1, False)])
def test_cards(number: int, is_told: bool, tmp_path: Path, run: Callable[..., Any]) -> None:
    """As where CUDA_VISIBLE_DEVICES was set for CUDA only, or counts the fastest first."""
    host = Host(tmp_path / "host", gpus=2)
    host.program(0, GIB)  # so that the other one has most room
    done = run(host, host.uuids[number])
    assert done.stdout == "here\n"
    assert (f"not on its lease's, GPU 1 ({host.uuids[1]})" in done.stderr) == is_told
