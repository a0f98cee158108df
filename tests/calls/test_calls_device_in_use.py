"""A call in a process that has started CUDA runs there only if its lease is on the very device in use."""

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
    driver, uuid, method = sys.argv[1:]
    cuda = ctypes.CDLL(driver)
    cuda.cuInit(1)
    if uuid:  # older drivers do not tell
        cuda.be(bytes.fromhex(uuid.partition("-")[2].replace("-", "")))
    here = run_in_worker(os.getpid, gpu_memory="2GiB", start_method=method) == os.getpid()
    print("here" if here else "in a worker")
"""


@pytest.fixture
def run(tmp_path: Path, driver: str, run_script: Callable[..., Any]) -> Callable[..., Any]:
    """Run a call of a flwr-clientapp whose CUDA has started on a device."""

    def run(host: Host, uuid: str, method: str = "auto") -> Any:
        ledger = tmp_path / "ledger"
        ledger.mkdir()
        env = {
            **host.env,
            "FLOWER_GPU_LEDGER_DIR": str(ledger),
            "FLOWER_GPU_STATE_DIR": str(tmp_path / "state"),
        }
        return run_script(SCRIPT, driver, uuid, method, env=env, name="flwr-clientapp")

    return run


@pytest.mark.parametrize(
    ("in_use", "where"), [("leased", "here"), ("other", "in a worker"), ("unknown", "in a worker")]
)
def test_mig_devices(in_use: str, where: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    """CUDA counts one device, with however many MIG devices; the lease goes to the one with most room."""
    host = Host(tmp_path / "host", gpus=1)
    small, large = host.mig(0, [4 * GIB, 8 * GIB])
    done = run(host, {"leased": large, "other": small, "unknown": ""}[in_use])
    assert done.stdout == f"{where}\n"


@pytest.mark.parametrize(("number", "where"), [(0, "in a worker"), (1, "here")])
def test_cards(number: int, where: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    """As where CUDA_VISIBLE_DEVICES was set for CUDA only, or counts the fastest first."""
    host = Host(tmp_path / "host", gpus=2)
    host.program(0, GIB)  # so that the other one has most room
    assert run(host, host.uuids[number]).stdout == f"{where}\n"


@pytest.mark.parametrize("method", ["inline", "in-process"])
def test_who_insists_on_this_process_is_told(method: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    host = Host(tmp_path / "host", gpus=2)
    host.program(0, GIB)
    done = run(host, host.uuids[0], method=method)
    assert done.stdout == "here\n"
    assert f"not on its lease's, GPU 1 ({host.uuids[1]})" in done.stderr
