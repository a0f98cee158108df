"""A module that workers find imported may have asked for GPUs: NVML answered, and CUDA is untouched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forkservers
import nvml_stub
import pytest
from forkservers import Client
from run_server_lines import Caller
from test_choose import driver as driver

from flower_gpu.errors import ConfigError
from flower_gpu.workers.forkserver import client, libraries
from flower_gpu.workers.threads import ONE_THREAD

pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(not client.is_supported(), reason="needs Linux 5.3"),
]

MODULE = "deciding_task"
WITH_GPUS = ("cuda", 2, True)
WITH_A_GPU = ("cuda", 1, True)
WITHOUT = ("cpu", 0, False)


@pytest.fixture(scope="module", autouse=True)
def _servers() -> Iterator[None]:
    with forkservers.own_servers():
        yield


@pytest.fixture
def host(tmp_path: Path) -> nvml_stub.Host:
    return nvml_stub.Host(tmp_path / "host", gpus=2)


def check(seen: dict[str, Any], found: tuple[str, int, bool]) -> None:
    assert tuple(seen["found"]) == found
    assert not seen["is_bad_fork"]
    assert not seen["is_available"]  # there is no CUDA here, and a worker asks that


CALL = """
from flower_gpu.workers import caller as worker
from flower_gpu.workers.call import Call

call = Call("deciding_task:seen", preload=[("deciding_task:load", {{}})], env={env})
answer = worker.run(call, "forkserver")
"""


def test_preloaded_in_a_fork_server(host: nvml_stub.Host) -> None:
    """Calls from which all GPUs are hidden have a server of their own; others share one, with any GPU."""
    with Client(env=dict(host.env)) as caller:
        servers = []
        for visible, expected in ((None, WITH_GPUS), ("GPU-1", WITH_GPUS), ("", WITHOUT)):
            env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
            seen = caller.do(CALL.format(env=env))
            check(seen, expected)
            servers.append(seen["parent"])
        assert servers[0] == servers[1] != servers[2]


@pytest.mark.parametrize(("start_method", "how"), [("forkserver", "modules"), ("spawn", "preload")])
def test_imported_by_a_run_server(host: nvml_stub.Host, start_method: str, how: str) -> None:
    what = {"modules": [MODULE]} if how == "modules" else {"preload": [(f"{MODULE}:load", {})]}
    caller = Caller(start_method=start_method, env={**host.env, **ONE_THREAD}, **what)
    seen = caller.run(f"{MODULE}:seen")
    check(seen, WITH_GPUS)
    assert seen["parent"] == caller.server_pid()
    caller.close()


@pytest.mark.parametrize(
    ("mode", "visible", "expected", "said"),
    [
        ("mig", "{mig}", WITH_A_GPU, ""),
        ("broken", None, WITHOUT, "the NVIDIA driver is not loaded"),
        # A control group, or a file's mode, keeps this account from a card.
        ("one hidden", "{gpu}", WITH_A_GPU, ""),
        ("one hidden", None, WITH_A_GPU, ""),
        ("all hidden", "{gpu}", WITHOUT, "GPU 0: this account may not use it"),
    ],
)
def test_what_pytorch_would_ask_cuda_for(
    host: nvml_stub.Host,
    mode: str,
    visible: str | None,
    expected: tuple[str, int, bool],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = {**host.env, **ONE_THREAD}
    mig = ",".join(host.mig(0, 2 * [nvml_stub.GIB])) if mode == "mig" else ""
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible.format(mig=mig, gpu=host.uuids[1])
    if mode == "broken":
        host.fail_init(nvml_stub.DRIVER_NOT_LOADED)
    for card in {"one hidden": [0], "all hidden": [0, 1]}.get(mode, []):
        host.fail("nvmlDeviceGetHandleByIndex_v2", nvml_stub.NO_PERMISSION, card)
    caller = Caller(start_method="forkserver", env=env, modules=[MODULE])
    check(caller.run(f"{MODULE}:seen"), expected)
    caller.close()
    told = capsys.readouterr().err
    assert told.count("a module that workers find imported has asked for GPUs") == bool(said)
    assert said in told


@pytest.mark.filterwarnings("ignore:workers are spawned:RuntimeWarning")
def test_a_preload_that_starts_cuda_is_named(driver: str) -> None:
    """Also where the process that forks workers is spawned: its forks could not use a GPU."""
    preload = [("plain_tasks:answer", {}), ("starts_cuda:load", {})]
    for start_method in ("forkserver", "spawn"):
        caller = Caller(start_method=start_method, env={"DRIVER": driver}, preload=preload)
        with pytest.raises(ConfigError, match="starts_cuda:load initialised CUDA, so that no worker could"):
            caller.run("plain_tasks:answer")
        caller.close()


def test_a_library_that_starts_cuda_is_left_to_workers(
    driver: str, capsys: pytest.CaptureFixture[str]
) -> None:
    caller = Caller(env={"DRIVER": driver, **ONE_THREAD}, modules=["starts_cuda", MODULE])
    assert caller.run("plain_tasks:answer") == 42
    assert "starts_cuda: importing it initialises CUDA. Each worker imports it" in capsys.readouterr().err
    check(caller.run(f"{MODULE}:seen"), WITHOUT)
    caller.close()


@pytest.mark.parametrize(
    ("file", "is_touched"),
    [("/dev/nvidiactl", False), ("/dev/nvidia0", False), ("/dev/nvidia-uvm", True)],
)
def test_device_files_of_nvml_are_not_cuda(
    monkeypatch: pytest.MonkeyPatch, file: str, is_touched: bool
) -> None:
    assert not libraries.cuda_is_touched()
    monkeypatch.setattr(os, "readlink", lambda _: file)
    assert libraries.cuda_is_touched() == is_touched
