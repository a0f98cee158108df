"""Fork servers and GPUs: libraries for GPUs are preloaded, and modules may ask for GPUs when preloaded.

Libraries that frameworks load at the first use of a GPU are preloaded only for workers with a GPU. If a
preloaded module asks for GPUs, NVML answers, and CUDA stays uninitialised.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_stub
import forkservers
import nvml_stub
import pytest
from forkservers import Client, only_server
from run_programs import run_python
from worker_lines import Caller

from flower_gpu.workers.forkserver import control
from flower_gpu.workers.threads import ONE_THREAD

pytestmark = forkservers.marks()

TASK = "tasks_forkserver:libraries_of_cudnn"
ALL = "", "_adv", "_cnn", "_engines_precompiled", "_engines_runtime_compiled", "_graph", "_heuristic", "_ops"


@pytest.fixture
def host(cuda_host: Callable[..., cuda_stub.Host]) -> Iterator[cuda_stub.Host]:
    with forkservers.own_servers():
        yield cuda_host(gpus=1)


def parts(files: list[str]) -> list[str]:
    """Return the parts of cuDNN that these files hold. Importing PyTorch loads only the unnamed part."""
    assert len({str(Path(file).parent) for file in files}) == 1
    return sorted(Path(file).name.removeprefix("libcudnn").partition(".")[0] for file in files)


def thread_count(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_a_call_with_a_gpu_has_the_libraries_preloaded(host: cuda_stub.Host) -> None:
    """They are loaded once, for the first call with a GPU. Afterwards the server can still be forked.

    They see the caller's variables: cuDNN reads its log level while it is loaded.
    """
    with Client(env=dict(host.env)) as caller:
        assert parts(caller.call(TASK, gpu="never")) == [""]
        assert parts(caller.call(TASK, gpu="require")) == [*ALL]
        assert caller.call("tasks_forkserver:allocates", gpu="require") > 0
        # A new server would not have loaded the libraries.
        assert parts(caller.call(TASK, gpu="never")) == [*ALL]
        assert thread_count(only_server().pid) == 1
        name = only_server().name
        with Client(env={**host.env, "CUDNN_LOGLEVEL_DBG": "0"}) as other:
            assert parts(other.call(TASK, gpu="require")) == [*ALL]
            assert len({name, *(server.name for server in control.status())}) == 2


# Delays the loading of a library of cuDNN, as a network disk may do.
SLOW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

void *dlopen(const char *file, int mode)
{
    if (file && strstr(file, "libcudnn_adv"))
        sleep(6);
    return ((void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen"))(file, mode);
}
"""


def test_a_server_that_loads_libraries_slowly_is_not_taken_for_hung(
    host: cuda_stub.Host, tmp_path: Path
) -> None:
    """It answers callers meanwhile, and those that wait say why."""
    forkservers.compile_library(tmp_path / "slow.so", SLOW, "-ldl")
    env = {**host.env, "LD_PRELOAD": f"{host.env['LD_PRELOAD']} {tmp_path / 'slow.so'}"}
    with Client(env=env) as caller:
        caller.do(
            """
            from flower_gpu.workers.forkserver import client
            client._SAY_S = client._ANSWER_S = 4.0
            os.environ["FLOWER_GPU_SAY_WAIT_S"] = "0.2"
            """
        )
        first = caller.call("tasks_forkserver:server")
        assert parts(caller.call(TASK, gpu="require")) == [*ALL]
        second = only_server()
        assert (second.pid != first, second.uptime_s > 6) == (True, True)
        assert "the fork server imports libraries for GPUs (cuDNN)" in caller.errors()
        assert "has not answered" not in caller.errors()


LOADS = """
import ctypes, sys
from types import ModuleType

sys.modules["torch"] = torch = ModuleType("torch")
torch.cuda = None
ctypes.CDLL(sys.argv[1])
from flower_gpu.workers.forkserver import libraries
libraries.load_for_gpus()
import tasks_forkserver
print(*tasks_forkserver.libraries_of_cudnn(), sep="\\n")
"""


def test_libraries_beside_the_cudnn_of_pytorch_are_loaded(tmp_path: Path) -> None:
    """The folder of PyTorch's cuDNN decides. Missing and broken libraries are skipped."""
    if (reason := cuda_stub.reason_not_to_run()) is not None:
        pytest.skip(reason)
    folder = tmp_path / "of the host"
    folder.mkdir()
    good = ("libcudnn.so.9.1.0", "libcudnn_graph.so.9", "libcudnn_adv.so.9", "libcudnn_heuristic.so.9")
    for name in good:
        command = ["cc", "-shared", f"-Wl,-soname,{name}", "-x", "c", "/dev/null", "-o", str(folder / name)]
        subprocess.run(command, check=True, timeout=150)
    (folder / "libcudnn_ops.so.9").write_text("not a library\n")
    done = run_python(LOADS, folder / good[0], env={**os.environ, **forkservers.WITH_TASKS})
    assert done.stdout.splitlines() == sorted(str(folder / name) for name in good), done.stderr


# Modules that ask for GPUs when they are preloaded ----------------------------------------------------------

MODULE = "deciding_task"
WITH_GPUS = ("cuda", 2, True)
WITH_A_GPU = ("cuda", 1, True)
WITHOUT = ("cpu", 0, False)


@pytest.fixture(scope="module")
def servers() -> Iterator[Path]:
    """Share the fork server with torch among the tests. Each test gets its own server with the module."""
    with forkservers.own_servers() as folder:
        yield folder


@pytest.fixture
def nvml_host(tmp_path: Path) -> nvml_stub.Host:
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


def test_a_preloaded_module_sees_the_gpus_of_the_call(nvml_host: nvml_stub.Host, servers: Path) -> None:
    """Calls from which all GPUs are hidden have their own server. All other calls share a server."""
    with Client(env=dict(nvml_host.env)) as caller:
        parents = []
        # The first call for a given GPU gets a successor of the server, with the libraries for GPUs.
        for visible in (None, "GPU-1", None, ""):
            env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
            seen = caller.do(CALL.format(env=env))
            check(seen, WITHOUT if visible == "" else WITH_GPUS)
            parents.append(seen["parent"])
        assert parents[1] == parents[2] != parents[3]


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
    nvml_host: nvml_stub.Host,
    mode: str,
    visible: str | None,
    expected: tuple[str, int, bool],
    warning: str,
    servers: Path,
) -> None:
    env = {**nvml_host.env, **ONE_THREAD}
    mig = ",".join(nvml_host.mig(0, 2 * [nvml_stub.GIB])) if mode == "mig" else ""
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible.format(mig=mig, gpu=nvml_host.uuids[1])
    if mode == "broken":
        nvml_host.fail_init(nvml_stub.DRIVER_NOT_LOADED)
    for card in {"one hidden": [0], "all hidden": [0, 1]}.get(mode, []):
        nvml_host.fail("nvmlDeviceGetHandleByIndex_v2", nvml_stub.NO_PERMISSION, card)
    before = {log: log.read_text() for log in servers.glob("*.log")}
    arguments = {"mode": mode, "visible": f"{visible}"}
    caller = Caller(env=env, preload=[(f"{MODULE}:load", arguments)], without=frozenset())
    check(caller.run(f"{MODULE}:seen"), expected)
    caller.close()
    logged = "".join(log.read_text().removeprefix(before.get(log, "")) for log in servers.glob("*.log"))
    assert logged.count("a module asked for GPUs when it was imported for all workers") == bool(warning)
    assert warning in logged
