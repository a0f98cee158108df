"""Confined workers can do what ordinary apps need, and their folder is removed with them.

They can name their threads, as NVIDIA's driver must, but write nothing else in /proc.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_stub
import psutil
import pytest
import thread_name_tasks
from confined_calls import run_confined
from live_processes import is_running
from run_programs import run_python
from thread_name_tasks import NAME
from waiting import until

from flower_gpu.errors import ConfigError, WorkerStartError, WorkerTaskError
from flower_gpu.programs.confine import Allowed
from flower_gpu.workers import confinement, state_folder
from flower_gpu.workers.life import OwnChild

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
]

TASKS = str(Path(__file__).parent)

Confined = Callable[..., Any]


@pytest.fixture
def method() -> str:
    """The start method of tests that use only one."""
    return "forkserver"


@pytest.fixture
def confined(method: str, monkeypatch: pytest.MonkeyPatch) -> Confined:
    """Run a task of confined_app in a confined worker."""
    monkeypatch.syspath_prepend(TASKS)
    monkeypatch.setenv("SSH_AUTH_SOCK", "/somewhere")
    return lambda task, *args, **allowed: call(task, *args, start_method=method, **allowed)


both_methods = pytest.mark.parametrize("method", ["forkserver", "spawn"])


def call(task: str, *args: Any, start_method: str = "forkserver", gpus: int = 1, **allowed: Any) -> Any:
    options = {"start_method": start_method, "num_gpus": gpus, "gpu": "never"}
    return run_confined(f"confined_app:{task}", *args, allowed=Allowed(**allowed), code=[TASKS], **options)


def folders() -> list[Path]:
    return list((state_folder.state_dir() / "confined").iterdir())


@both_methods
def test_a_message_has_its_own_folders_which_are_removed(confined: Confined) -> None:
    variables = confined("variables")
    folder = Path(variables["HOME"]).parent
    assert folder.parent == state_folder.state_dir() / "confined"
    assert all(Path(path).is_relative_to(folder) for path in variables.values() if path)
    assert (variables["tempfile"], variables["agent"]) == (variables["TMPDIR"], None)
    assert not folder.exists()


def test_only_paths_of_the_operator_can_be_read_or_written(confined: Confined, tmp_path: Path) -> None:
    data, results = tmp_path / "data", tmp_path / "results"
    for folder in (data, results):
        folder.mkdir()
        (folder / "file").write_text("of the operator")
    (tmp_path / "x").write_text("not for apps")
    paths = {"read": (str(data),), "write": (str(results),)}
    assert confined("reads", str(data / "file"), **paths) == "of the operator"
    assert confined("writes", str(results / "new"), **paths) == "done"
    assert (results / "new").read_text() == "written by an app"
    for task, path in (("writes", data / "new"), ("reads", tmp_path / "x"), ("reads", data / ".." / "x")):
        with pytest.raises(WorkerTaskError, match="PermissionError"):
            confined(task, str(path), **paths)


def test_only_the_given_port_can_be_connected_to(confined: Confined) -> None:
    with socket.create_server(("127.0.0.1", 0)) as named, socket.create_server(("127.0.0.1", 0)) as other:
        ports = (named.getsockname()[1],)
        assert confined("connects", *ports, ports=ports) == "done"
        assert confined("opens_udp", ports=ports) == "done"
        for task, port in (("connects", (other.getsockname()[1],)), ("opens_udp", ())):
            with pytest.raises(WorkerTaskError, match="PermissionError"):
                confined(task, *port, ports=ports if port else ())


def test_an_app_can_start_processes_and_programs(confined: Confined) -> None:
    assert confined("computes_in_processes") == [[1, 4, 9], {"a": 1}, "from a program\n"]


@both_methods
def test_a_nested_worker_is_confined_and_may_return_any_object(confined: Confined) -> None:
    assert confined("asks_another_worker", "/etc/shadow") == ["(1+2j)", "PermissionError"]


def test_files_can_be_copied_with_their_dates(confined: Confined) -> None:
    assert confined("copies_and_touches") == "text"


@both_methods
def test_processes_and_folders_that_a_worker_leaves_are_removed(confined: Confined) -> None:
    assert confined("is_alone")
    for task in ("leaves_a_process", "leaves_a_process_that_leaves_the_group"):
        pid = confined(task)
        until(lambda: not is_running(pid), task, timeout_s=90)  # noqa: B023 - called before the next iteration
    assert not Path(confined("leaves_folders_that_are_hard_to_remove")).exists()
    assert confined("variables")


def test_a_symlink_left_for_the_next_try_is_not_followed(confined: Confined, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the app's own folders cannot be made"):
        confined("leaves_a_link_for_the_next_try", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_worker_that_stops_to_be_traced_has_not_exited() -> None:
    """The kernel notifies the parent as if the worker had ended."""
    program = "import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19)"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        worker = OwnChild(process.pid, process.wait)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_TRACING_STOP, "it has stopped")
        assert not worker.has_exited()
        os.kill(process.pid, signal.SIGKILL)  # Popen.kill would assume that it has ended.
        until(worker.has_exited, "it has exited")
        assert worker.reap() == -signal.SIGKILL


def test_after_a_failed_start_the_caller_no_longer_adopts_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    def adopts() -> bool:
        value = ctypes.c_int(0)
        ctypes.CDLL(None).prctl(37, ctypes.byref(value), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
        return bool(value.value)

    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = adopts()
    with pytest.raises(WorkerStartError):
        call("variables", start_method="spawn")
    assert adopts() == before


@pytest.mark.parametrize(
    ("options", "text"),
    [({"gpus": 2}, "allows one GPU for a call")]
    + [({"start_method": method}, "open files of its caller") for method in ("in-process", "fork")],
)
def test_calls_that_cannot_be_confined_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call("variables", **options)


def test_the_next_message_removes_the_folder_of_a_killed_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]; from test_confinement import call; call('waits', 'text')"
    )
    line = [sys.executable, "-c", program, TASKS, str(Path(TASKS).parent)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "waits\n"
        (folder,) = folders()
        monkeypatch.syspath_prepend(TASKS)
        call("variables")
        assert folders() == [folder], "the folder of a running process must stay"
        os.kill(caller.pid, signal.SIGKILL)
    until(lambda: call("variables") is not None and not folders(), "the folder is removed")


# Names of threads -------------------------------------------------------------------------------------------

METHODS = ("names_a_thread", "names_a_thread_by_number", "in_a_fork", "in_a_fork_of_a_fork")
#: Tasks that name threads in other programs. With Yama, only ancestors can read a process, and the answering
#: process is no ancestor of programs that a worker of a fork server starts.
IN_PROGRAMS = ("in_a_worker_of_a_worker", "in_a_spawned_process", "in_a_program")

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
is_limited_by_yama = YAMA.exists() and int(YAMA.read_text()) > 0 and os.getuid() != 0


@pytest.fixture
def confined_thread(method: str, monkeypatch: pytest.MonkeyPatch) -> Confined:
    """Run a task of thread_name_tasks in a confined worker."""
    monkeypatch.syspath_prepend(TASKS)
    options = {"start_method": method, "gpu": "never"}
    return lambda task, *args: run_confined(f"thread_name_tasks:{task}", *args, code=[TASKS], **options)


@both_methods
def test_threads_can_be_named_in_all_processes_of_an_app(confined_thread: Confined, method: str) -> None:
    tasks = [*METHODS, *IN_PROGRAMS]
    if method == "forkserver":  # Only this worker has torch, which takes seconds to import.
        tasks += ["in_a_data_loader"]
        if is_limited_by_yama:
            tasks = [*METHODS, "in_a_data_loader", "in_a_worker_of_a_worker"]
    assert confined_thread("everywhere", tasks) == dict.fromkeys(tasks, NAME)


def test_nothing_else_in_proc_can_be_written(confined_thread: Confined) -> None:
    with subprocess.Popen(["sleep", "600"]) as stranger:
        pids = {"caller": os.getpid(), "stranger": stranger.pid}
        confined_writable = confined_thread("writable", pids)
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


def test_a_received_file_cannot_name_threads_of_another_process(confined_thread: Confined) -> None:
    assert confined_thread("writes_through_an_open_file") == "EINVAL"


def test_strange_paths_cannot_be_opened(confined_thread: Confined) -> None:
    results = confined_thread("opens_by_strange_paths")
    assert "opened" not in results
    assert results[:5] == ["EFAULT"] * 5


@pytest.mark.parametrize("task", ["sends_unexpected_descriptors", "kills_waiting_processes"])
def test_attacks_on_the_answering_process_leak_no_descriptors(confined_thread: Confined, task: str) -> None:
    confined_thread("names_a_thread")
    before = psutil.Process().num_fds()
    assert confined_thread(task) == NAME
    assert psutil.Process().num_fds() == before


def test_a_process_at_its_limit_of_files_gets_emfile(confined_thread: Confined) -> None:
    code, name = confined_thread("limit_of_files")
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
