"""What frameworks load when a GPU is first used is there in workers that are to use one, and in no others."""

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
    made = cuda_host(gpus=1)
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    made.env["FLOWER_GPU_LEDGER_DIR"] = str(ledger)
    with forkservers.own_servers():
        yield made


def parts(files: list[str]) -> list[str]:
    """Return which parts of cuDNN these are. Importing PyTorch loads the first one."""
    assert len({str(Path(file).parent) for file in files}) == 1
    return sorted(Path(file).name.removeprefix("libcudnn").partition(".")[0] for file in files)


def thread_count(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_a_call_with_a_gpu_finds_them(host: cuda_stub.Host) -> None:
    """They are loaded once, when the first such call comes, and leave a server that can still be forked.

    What they have read is that of the caller: cuDNN reads how much it logs while it is loaded.
    """
    with Client(env=dict(host.env)) as caller:
        assert parts(caller.call(TASK, gpu="never")) == [""]
        assert parts(caller.call(TASK, gpu="require")) == [*ALL]
        assert caller.call("tasks_forkserver:allocates", gpu="require") > 0
        assert parts(caller.call(TASK, gpu="never")) == [*ALL]  # a new server would have none
        assert thread_count(only_server().pid) == 1
        name = only_server().name
        with Client(env={**host.env, "CUDNN_LOGLEVEL_DBG": "0"}) as other:
            assert parts(other.call(TASK, gpu="require")) == [*ALL]
            assert len({name, *(server.name for server in control.status())}) == 2


# Loads one of cuDNN's libraries as slowly as from a disk of a network.
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


def test_a_server_that_loads_them_slowly_is_none_that_hangs(host: cuda_stub.Host, tmp_path: Path) -> None:
    """It answers other callers meanwhile, and those that wait say for what."""
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


def test_another_cudnn(tmp_path: Path) -> None:
    """They are those beside the one that PyTorch is linked with, except for missing and broken ones."""
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
