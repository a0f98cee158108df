"""A confined worker has a lease like any other worker, but cannot release it or write into its ticket."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from calls_host import GIB, CallsHost

from flower_gpu.calls.worker_report import used_of_lease
from flower_gpu.leases.lease import Lease, Share
from flower_gpu.workers import confinement

pytestmark = [
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
]


def start(host: CallsHost, *steps: list[Any], **options: Any) -> Any:
    """Start a client that makes a call in a confined worker."""
    caller = host.start()
    folders = [str(host.folder), host.env["NVML_STUB_DIR"]]
    caller.send("run_confined", "calls_tasks:follow", steps, write=folders, gpu_memory="4GiB", **options)
    return caller


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_the_ticket_has_the_use_of_a_confined_worker_until_it_ends(
    calls_host: CallsHost, method: str
) -> None:
    steps = (["unlock"], ["allocate", 2.0], calls_host.announce("here"), calls_host.wait("go"))
    caller = start(calls_host, *steps, start_method=method)
    calls_host.wait_until_reached("here")
    state = calls_host.until(
        lambda state: any(holder["used"].get(calls_host.uuid, 0) >= 2 * GIB for holder in state["holders"])
    )
    [holder] = state["holders"]
    assert holder["parts"] == {calls_host.uuid: 4 * GIB}
    assert holder["used"][calls_host.uuid] <= 3 * GIB
    calls_host.go("go")
    assert caller.answer()["CUDA_VISIBLE_DEVICES"] == calls_host.uuid
    calls_host.until_free()


def test_a_confined_worker_that_ran_out_of_memory_gets_a_larger_lease(calls_host: CallsHost) -> None:
    caller = start(calls_host, ["allocate", 6.0])
    assert caller.answer()["answers"] == ["0.0"]
    events = calls_host.events()
    assert "out_of_memory" in events
    assert events.count("lease_granted") == 2
    calls_host.until_free()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_confined_client_of_an_mps_daemon_can_connect(
    calls_host: CallsHost, tmp_path_factory: pytest.TempPathFactory, method: str
) -> None:
    pipes = tmp_path_factory.mktemp("pipes")
    (pipes / "log").write_text("of the daemon")
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(pipes / "control"))
        daemon.listen()
        caller = calls_host.start(CUDA_MPS_PIPE_DIRECTORY=str(pipes))
        command = ("run_confined", "host_tasks:use_mps_folder", str(pipes))
        options = {"write": [calls_host.env["NVML_STUB_DIR"]], "start_method": method}
        outcomes = caller(*command, gpu_memory="1GiB", **options)
        forbidden = dict.fromkeys(("make", "remove", "replace", "empty"), "EACCES")
        assert outcomes == {"connect": "done", "list": "done", "read and write": "done", **forbidden}
        outcomes = caller(*command, gpu="never", **options)
        assert outcomes == {"connect": "done", "list": "EACCES", "read and write": "EACCES", **forbidden}
    (pipes / "control").unlink()  # the daemon has ended
    assert caller(*command, gpu_memory="1GiB", **options)["read and write"] == "EACCES"


def test_events_of_an_app_neither_replace_its_result_nor_flood_the_trace(calls_host: CallsHost) -> None:
    """Some events report an invalid version of PyTorch."""
    events = [
        {"event": "no_cuda", "reason": "CUDA is absent", "torch": "\x1b[2J", "torch_cuda": version}
        for version in ("x", "\x1b[2J", "9" * 300)
    ]
    events += [{"event": "progress", "desc": "a", "n": 0, "total": 0}, {"event": "task_started"}]
    caller = calls_host.start()
    write = [calls_host.env["NVML_STUB_DIR"]]
    assert (
        caller("run_confined", "calls_tasks:send_events", *events, write=write, gpu_memory="1GiB") == "done"
    )
    assert len(calls_host.trace("task_started")) == 1
    seconds = calls_host.trace("worker_finished")[0]["seconds"]
    assert 1 <= len(calls_host.trace("progress")) <= 2 + seconds / 0.5


def test_reported_use_counts_only_for_leased_gpus_and_up_to_their_size() -> None:
    share = Share(index=0, uuid="GPU-1", name="a", memory_bytes=GIB, cap_bytes=GIB, total_bytes=16 * GIB)
    lease = Lease(id="x", shares=(share,), ticket=str(Path("/somewhere")))
    assert used_of_lease({"GPU-1": 99 * GIB, "GPU-2": 1}, lease) == {"GPU-1": 16 * GIB}
    assert used_of_lease({"GPU-2": 1}, lease) == used_of_lease({"GPU-1": 1}, None) == {}
