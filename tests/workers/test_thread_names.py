"""Confined programs name their threads, as NVIDIA's driver must, and write nothing else into /proc."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_stub
import psutil
import pytest
import thread_name_tasks
from thread_name_tasks import NAME

from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import call_settings
from flower_gpu.flower.confine import Allowed, for_message
from flower_gpu.workers import confinement

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
]

TASKS = str(Path(__file__).parent)
WAYS = ("names_a_thread", "names_it_by_number", "in_a_fork", "in_a_fork_of_a_fork")
#: Other programs. Where Yama lets only ancestors read a process, those of a fork server's worker have none.
IN_PROGRAMS = ("in_a_worker_of_a_worker", "in_a_spawned_process", "in_a_program")

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
is_limited = YAMA.exists() and int(YAMA.read_text()) > 0 and os.getuid() != 0

Confined = Callable[..., Any]


@pytest.fixture
def method() -> str:
    """How workers start, where a test does not look at several ways."""
    return "forkserver"


@pytest.fixture
def confined(method: str, monkeypatch: pytest.MonkeyPatch) -> Confined:
    """Run a task of thread_name_tasks in a confined worker."""
    monkeypatch.syspath_prepend(TASKS)

    def call(task: str, *args: Any) -> Any:
        settings = call_settings({"start_method": method, "gpu": "never"})
        with for_message(Allowed(), [TASKS]) as found:
            name = f"thread_name_tasks:{task}"
            return run_call(
                name, args, settings=settings.with_worker(confinement=found), kind="train", by_name=True
            )

    return call


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_threads_are_named_wherever_a_program_starts_some(confined: Confined, method: str) -> None:
    ways = [*WAYS, *IN_PROGRAMS]
    if method == "forkserver":  # which has torch: to import it takes seconds
        ways += ["in_a_data_loader"]
        if is_limited:
            ways = [*WAYS, "in_a_data_loader", "in_a_worker_of_a_worker"]
    assert confined("everywhere", ways) == dict.fromkeys(ways, NAME)


def test_nothing_else_of_proc_can_be_written(confined: Confined) -> None:
    with subprocess.Popen(["sleep", "600"]) as stranger:
        pids = {"caller": os.getpid(), "stranger": stranger.pid}
        found = confined("writable", pids)
        could = thread_name_tasks.writable(pids)
        stranger.kill()
    own = ["/proc/self/task/other thread/comm", "/proc/self/task/self/comm"]
    assert found == {"self": own, "child": [], "caller": [], "stranger": [], "else": []}
    # So the attempts are real ones.
    for name in ("self", "child", "stranger"):
        files = ("oom_score_adj", "coredump_filter", "timerslack_ns", "clear_refs", "mem")
        assert {f"/proc/{name}/{file}" for file in (*files, f"task/{name}/comm")} <= set(could[name])
    assert os.getuid() or "/proc/sys/kernel/core_pattern" in could["else"]


def test_who_has_the_file_of_another_process_can_not_name_its_threads(confined: Confined) -> None:
    assert confined("writes_through_an_open_file") == "EINVAL"


def test_strange_paths_are_opened_as_by_anybody_who_is_confined(confined: Confined) -> None:
    found = confined("opens_by_strange_paths")
    assert "opened" not in found
    assert found[:5] == ["EFAULT"] * 5


@pytest.mark.parametrize("task", ["sends_it_what_it_does_not_expect", "ends_processes_that_wait"])
def test_who_answers_goes_on_and_keeps_nothing_open(confined: Confined, task: str) -> None:
    confined("names_a_thread")
    before = psutil.Process().num_fds()
    assert confined(task) == NAME
    assert psutil.Process().num_fds() == before


def test_a_process_without_room_for_another_file_is_told_so(confined: Confined) -> None:
    code, name = confined("limit_of_files")
    assert (code, name) == ("EMFILE", NAME)


#: Gives this process a filter of seccomp for which somebody else answers, as some containers do.
_WATCHED = """
import ctypes, json, os, struct, sys
from flower_gpu import seccomp
from flower_gpu.workers import confinement, events
from flower_gpu.flower.confine import Allowed, for_message
folder, file, is_watched = sys.argv[1:]
with for_message(Allowed(write=(folder,)), []) as told:
    environ = {**os.environ, **told.environment(), "FLOWER_GPU_GUARDED": file}
    if os.fork():
        os.wait()
    else:
        if is_watched == "True":
            code = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0x7fff0000))
            libc = ctypes.CDLL(None)
            libc.prctl(38, 1, 0, 0, 0)
            program = struct.pack("@HP", 1, ctypes.addressof(code))
            assert libc.syscall(seccomp._SECCOMP[seccomp._machine()], 1, 1 << 3, program) > 0
        said = []
        with events.sending_to(said.append):
            confinement.apply(environ)
        print(json.dumps(said), flush=True)
        os._exit(0)
"""


@pytest.mark.parametrize("is_watched", [True, False])
def test_where_threads_cannot_be_named_an_app_with_a_gpu_is_told(tmp_path: Path, is_watched: bool) -> None:
    file = tmp_path / "gpu"
    file.touch()
    line = [sys.executable, "-c", _WATCHED, str(tmp_path), str(file), str(is_watched)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [one["event"] for one in said] == ["lacks"] * is_watched
    assert all("CUDA of NVIDIA's drivers from 570 on does not start" in one["text"] for one in said)


#: A call that gets a GPU, confined; its environment is that of a host with a stand-in for CUDA.
_ON_GPU = """
import json, os, sys
from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import call_settings
from flower_gpu.flower.confine import Allowed, for_message
settings = call_settings({"start_method": "spawn", "gpu_memory": "2GiB"})
with for_message(Allowed(write=(os.environ["NVML_STUB_DIR"],)), sys.argv[1:]) as told:
    name = "thread_name_tasks:starts_cuda"
    settings = settings.with_worker(confinement=told)
    print(json.dumps(run_call(name, settings=settings, kind="train", by_name=True)))
"""


def test_cuda_starts(cuda_host: Callable[..., cuda_stub.Host], tmp_path: Path) -> None:
    """The driver of the stand-in fails, as a real one does, where it cannot name its thread."""
    (tmp_path / "ledger").mkdir()
    env = {
        **os.environ,
        **cuda_host(gpus=1).env,
        "FLOWER_GPU_LEDGER_DIR": str(tmp_path / "ledger"),
        "PYTHONPATH": os.pathsep.join([TASKS, str(Path(TASKS).parent)]),
    }
    line = [sys.executable, "-c", _ON_GPU, TASKS]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"fork": "cuda:0", "here": "cuda:0"}
