"""Confined programs can name their threads, as NVIDIA's driver must, but write nothing else in /proc."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_stub
import psutil
import pytest
import thread_name_tasks
from confined_calls import run_confined
from run_programs import run_python
from thread_name_tasks import NAME

from flower_gpu.workers import confinement

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
]

TASKS = str(Path(__file__).parent)
METHODS = ("names_a_thread", "names_a_thread_by_number", "in_a_fork", "in_a_fork_of_a_fork")
#: Tasks that name threads in other programs. With Yama, only ancestors can read a process, and the answering
#: process is no ancestor of programs that a worker of a fork server starts.
IN_PROGRAMS = ("in_a_worker_of_a_worker", "in_a_spawned_process", "in_a_program")

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
is_limited_by_yama = YAMA.exists() and int(YAMA.read_text()) > 0 and os.getuid() != 0

Confined = Callable[..., Any]


@pytest.fixture
def method() -> str:
    """The start method of tests that use only one."""
    return "forkserver"


@pytest.fixture
def confined(method: str, monkeypatch: pytest.MonkeyPatch) -> Confined:
    """Run a task of thread_name_tasks in a confined worker."""
    monkeypatch.syspath_prepend(TASKS)

    options = {"start_method": method, "gpu": "never"}
    return lambda task, *args: run_confined(f"thread_name_tasks:{task}", *args, code=[TASKS], **options)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_threads_can_be_named_in_all_processes_of_an_app(confined: Confined, method: str) -> None:
    tasks = [*METHODS, *IN_PROGRAMS]
    if method == "forkserver":  # Only this worker has torch, which takes seconds to import.
        tasks += ["in_a_data_loader"]
        if is_limited_by_yama:
            tasks = [*METHODS, "in_a_data_loader", "in_a_worker_of_a_worker"]
    assert confined("everywhere", tasks) == dict.fromkeys(tasks, NAME)


def test_nothing_else_in_proc_can_be_written(confined: Confined) -> None:
    with subprocess.Popen(["sleep", "600"]) as stranger:
        pids = {"caller": os.getpid(), "stranger": stranger.pid}
        confined_writable = confined("writable", pids)
        unconfined_writable = thread_name_tasks.writable(pids)
        stranger.kill()
    own_files = ["/proc/self/task/other thread/comm", "/proc/self/task/self/comm"]
    assert confined_writable == {"self": own_files, "child": [], "caller": [], "stranger": [], "else": []}
    # This process can write these files, so the attempts work without confinement.
    for name in ("self", "child", "stranger"):
        files = ("oom_score_adj", "coredump_filter", "timerslack_ns", "clear_refs", "mem")
        assert {f"/proc/{name}/{file}" for file in (*files, f"task/{name}/comm")} <= set(
            unconfined_writable[name]
        )
    assert os.getuid() or "/proc/sys/kernel/core_pattern" in unconfined_writable["else"]


def test_a_received_file_cannot_name_threads_of_another_process(confined: Confined) -> None:
    assert confined("writes_through_an_open_file") == "EINVAL"


def test_strange_paths_cannot_be_opened(confined: Confined) -> None:
    results = confined("opens_by_strange_paths")
    assert "opened" not in results
    assert results[:5] == ["EFAULT"] * 5


@pytest.mark.parametrize("task", ["sends_unexpected_descriptors", "kills_waiting_processes"])
def test_attacks_on_the_answering_process_leak_no_descriptors(confined: Confined, task: str) -> None:
    confined("names_a_thread")
    before = psutil.Process().num_fds()
    assert confined(task) == NAME
    assert psutil.Process().num_fds() == before


def test_a_process_at_its_limit_of_files_gets_emfile(confined: Confined) -> None:
    code, name = confined("limit_of_files")
    assert (code, name) == ("EMFILE", NAME)


#: Installs a seccomp filter that another process answers for, as some containers do.
_WITH_FILTER = """
import ctypes, json, os, struct, sys
from flower_gpu import seccomp
from flower_gpu.workers import confinement, events
from flower_gpu.programs.confine import Allowed, for_message
folder, file, is_watched = sys.argv[1:]
with for_message(Allowed(write=(folder,)), []) as message_confinement:
    environ = {**os.environ, **message_confinement.environment(), "FLOWER_GPU_GUARDED": file}
    if os.fork():
        os.wait()
    else:
        if is_watched == "True":
            code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0x7fff0000))
            libc = ctypes.CDLL(None)
            libc.prctl(38, 1, 0, 0, 0)
            program = struct.pack("@HP", 1, ctypes.addressof(code))
            assert libc.syscall(seccomp._SECCOMP[seccomp._machine()], 1, 1 << 3, program) > 0
        sent = []
        with events.sending_to(sent.append):
            confinement.apply(environ)
        print(json.dumps(sent), flush=True)
        os._exit(0)
"""


@pytest.mark.parametrize("is_watched", [True, False])
def test_an_app_with_a_gpu_is_warned_if_threads_cannot_be_named(tmp_path: Path, is_watched: bool) -> None:
    file = tmp_path / "gpu"
    file.touch()
    done = run_python(_WITH_FILTER, tmp_path, file, is_watched)
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)
    assert [event["event"] for event in sent] == ["lacks"] * is_watched
    assert all("CUDA of NVIDIA's drivers from 570 on does not start" in event["text"] for event in sent)


#: A confined call with a GPU. Its environment is that of a host with a stand-in for CUDA.
_ON_GPU = """
import json, os, sys
from confined_calls import run_confined
from flower_gpu.programs.confine import Allowed
options = {"allowed": Allowed(write=(os.environ["NVML_STUB_DIR"],)), "code": sys.argv[1:]}
options |= {"start_method": "spawn", "gpu_memory": "2GiB"}
print(json.dumps(run_confined("thread_name_tasks:starts_cuda", **options)))
"""


def test_cuda_starts_in_a_confined_worker_and_its_forks(
    cuda_host: Callable[..., cuda_stub.Host],
) -> None:
    """Like a real driver, the stand-in fails if it cannot name its thread."""
    path = os.pathsep.join([TASKS, str(Path(TASKS).parent)])
    env = {**os.environ, **cuda_host(gpus=1).env, "PYTHONPATH": path}
    done = run_python(_ON_GPU, TASKS, env=env)
    assert done.returncode == 0, done.stderr
    devices = json.loads(done.stdout.splitlines()[-1])
    assert devices == {"fork": "cuda:0", "worker": "cuda:0"}
