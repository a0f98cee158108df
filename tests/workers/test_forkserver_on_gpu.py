"""Libraries that frameworks load at the first use of a GPU are preloaded only for workers with a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import cuda_stub
import forkservers
import pytest
from forkservers import Client, only_server

from flower_gpu.workers.forkserver import control

pytestmark = forkservers.marks()

TASK = "tasks_forkserver:libraries_of_cudnn"
ALL = "", "_adv", "_cnn", "_engines_precompiled", "_engines_runtime_compiled", "_graph", "_heuristic", "_ops"


@pytest.fixture
def host(cuda_host: Callable[..., cuda_stub.Host], tmp_path: Path) -> Iterator[cuda_stub.Host]:
    stub_host = cuda_host(gpus=1)
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    stub_host.env["FLOWER_GPU_LEDGER_DIR"] = str(ledger)
    with forkservers.own_servers():
        yield stub_host


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
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOADS), str(folder / good[0])],
        env={**os.environ, **forkservers.WITH_TASKS},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.stdout.splitlines() == sorted(str(folder / name) for name in good), done.stderr
