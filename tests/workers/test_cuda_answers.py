"""A module that is preloaded for workers may ask for GPUs: NVML answers, and CUDA stays uninitialised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forkservers
import nvml_stub
import pytest
from forkservers import Client
from worker_lines import Caller

from flower_gpu.workers.threads import ONE_THREAD

pytestmark = forkservers.marks()

MODULE = "deciding_task"
WITH_GPUS = ("cuda", 2, True)
WITH_A_GPU = ("cuda", 1, True)
WITHOUT = ("cpu", 0, False)


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[Path]:
    """Share the fork server with torch among the tests. Each test gets its own server with the module."""
    with forkservers.own_servers() as folder:
        yield folder


@pytest.fixture
def host(tmp_path: Path) -> nvml_stub.Host:
    return nvml_stub.Host(tmp_path / "host", gpus=2)


def check(seen: dict[str, Any], expected: tuple[str, int, bool]) -> None:
    assert tuple(seen["at_import"]) == expected
    assert not seen["is_bad_fork"]
    # The worker itself asks CUDA, and this host has none.
    assert not seen["is_available"]


CALL = """
from flower_gpu.workers import caller as worker
from flower_gpu.workers.call import Call

call = Call("deciding_task:seen", preload=[("deciding_task:load", {{}})], env={env})
answer = worker.run(call, "forkserver")
"""


def test_a_preloaded_module_sees_the_gpus_of_the_call(host: nvml_stub.Host) -> None:
    """Calls from which all GPUs are hidden have their own server. All other calls share a server."""
    with Client(env=dict(host.env)) as caller:
        servers = []
        # The first call for a given GPU gets a successor of the server, with the libraries for GPUs.
        for visible in (None, "GPU-1", None, ""):
            env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
            seen = caller.do(CALL.format(env=env))
            check(seen, WITHOUT if visible == "" else WITH_GPUS)
            servers.append(seen["parent"])
        assert servers[1] == servers[2] != servers[3]


@pytest.mark.parametrize(
    ("mode", "visible", "expected", "warning"),
    [
        ("mig", "{mig}", WITH_A_GPU, ""),
        ("broken", None, WITHOUT, "the NVIDIA driver is not loaded"),
        # A control group, or the mode of a device file, denies this account the card.
        ("one hidden", "{gpu}", WITH_A_GPU, ""),
        ("one hidden", None, WITH_A_GPU, ""),
        ("all hidden", "{gpu}", WITHOUT, "GPU 0: this account may not use it"),
    ],
)
def test_answers_depend_on_the_gpus_that_are_visible(
    host: nvml_stub.Host,
    mode: str,
    visible: str | None,
    expected: tuple[str, int, bool],
    warning: str,
    servers: Path,
) -> None:
    env = {**host.env, **ONE_THREAD}
    mig = ",".join(host.mig(0, 2 * [nvml_stub.GIB])) if mode == "mig" else ""
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible.format(mig=mig, gpu=host.uuids[1])
    if mode == "broken":
        host.fail_init(nvml_stub.DRIVER_NOT_LOADED)
    for card in {"one hidden": [0], "all hidden": [0, 1]}.get(mode, []):
        host.fail("nvmlDeviceGetHandleByIndex_v2", nvml_stub.NO_PERMISSION, card)
    before = {log: log.read_text() for log in servers.glob("*.log")}
    arguments = {"mode": mode, "visible": f"{visible}"}
    caller = Caller(env=env, preload=[(f"{MODULE}:load", arguments)], without=frozenset())
    check(caller.run(f"{MODULE}:seen"), expected)
    caller.close()
    logged = "".join(log.read_text().removeprefix(before.get(log, "")) for log in servers.glob("*.log"))
    assert logged.count("a module asked for GPUs when it was imported for all workers") == bool(warning)
    assert warning in logged
