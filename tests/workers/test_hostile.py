"""Callers under odd conditions: closed streams, limits, ignored signals, other code that reaps children."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from forkservers import WITH_TASKS
from processes import SUPERVISED, Run, is_running, wait_until

from flower_gpu import run_in_worker
from flower_gpu.errors import WorkerDiedError, WorkerTimeoutError

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def own_folder() -> Iterator[str]:
    """A folder that the other user of a test may write to."""
    folder = tempfile.mkdtemp(dir="/tmp")
    os.chown(folder, 54321, 54321)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("closed", ["1", "012"])
def test_a_caller_may_have_closed_its_standard_streams(
    closed: str, run_script: RunScript, tmp_path: Path
) -> None:
    """Descriptors of the call could get the numbers 0, 1 and 2, which the worker uses for its streams."""
    answer = tmp_path / "answer"
    run_script(
        """
        import os, sys
        path, closed, *methods = sys.argv[1:]
        for number in closed:
            os.close(int(number))
        if "1" in closed:
            sys.stdout = None
        if "2" in closed:
            sys.stderr = None
        from flower_gpu import WorkerDiedError, run_in_worker

        def streams():
            return os.readlink("/proc/self/fd/0"), os.readlink("/proc/self/fd/1")[:5]

        results = []
        for method in methods:
            results.append(run_in_worker(streams, start_method=method))
            try:
                run_in_worker("crash_tasks:kill_itself", 9, start_method=method)
            except WorkerDiedError as error:
                results.append((error.exitcode, error.tail))
            results.append([os.readlink("/proc/self/fd/" + number) for number in closed])
        with open(path, "w") as file:
            print(results, file=file)
        os._exit(0)  # Python cannot end normally without its streams.
        """,
        str(answer),
        closed,
        *SUPERVISED,
        env=WITH_TASKS,
    )
    # The descriptors stay open on /dev/null, so that no file of the script gets their numbers.
    expected = [("/dev/null", "pipe:"), (-9, "the last words"), ["/dev/null"] * len(closed)]
    assert answer.read_text() == f"{expected * 3}\n"


def test_a_caller_may_ignore_sigchld(run_script: RunScript) -> None:
    """The kernel then reaps workers, so their exit status is lost, except for those of a fork server."""
    done = run_script(
        """
        import signal, subprocess, sys
        from flower_gpu import WorkerDiedError, run_in_worker
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

        def child_of_the_worker():
            return subprocess.run(["false"]).returncode

        for method in sys.argv[1:]:
            print(run_in_worker(child_of_the_worker, start_method=method))
            try:
                run_in_worker("crash_tasks:kill_itself", 9, start_method=method)
            except WorkerDiedError as error:
                print("in an unknown way" in str(error), "SIGCHLD is ignored" in str(error), error.tail)
        """,
        *SUPERVISED,
        env=WITH_TASKS,
    )
    assert done.stdout.splitlines() == [
        line
        for unknown in (method != "forkserver" for method in SUPERVISED)
        for line in ("1", "the last words", f"{unknown} {unknown} the last words")
    ]


def test_other_code_may_reap_all_children(run_with_methods: RunScript) -> None:
    done = run_with_methods(
        """
        def reap():
            while True:
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    time.sleep(0.001)

        threading.Thread(target=reap, daemon=True).start()
        for method in METHODS:
            for _ in range(3):
                print(run_in_worker("plain_tasks:answer", start_method=method))
            try:
                run_in_worker("crash_tasks:os_exit", 7, start_method=method)
            except WorkerDiedError:
                print("died")
        """
    )
    assert done.stdout.splitlines() == (["42"] * 3 + ["leaving at once", "died"]) * 3


def test_a_call_with_too_few_descriptors_fails_and_leaks_none(run_with_methods: RunScript) -> None:
    """With enough descriptors, the call succeeds."""
    done = run_with_methods(
        """
        import os, resource, sys

        def answer():
            return 42

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for method in METHODS:
            run_in_worker(answer, start_method=method)
            used = len(os.listdir("/proc/self/fd"))
            results = []
            for more in range(1, 40, 12 if method == "spawn" else 3):
                resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))
                try:
                    results.append(run_in_worker(answer, start_method=method))
                except WorkerError as error:
                    assert "Too many open files" in str(error), error
                    results.append(type(error).__name__)
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                assert len(os.listdir("/proc/self/fd")) == used, (more, os.listdir("/proc/self/fd"))
            print(results[0], results[-1], set(results) <= {"WorkerStartError", "WorkerDiedError", 42})
        """
    )
    assert done.stdout == "WorkerStartError 42 True\n" * 3


def test_a_limit_of_the_file_size_is_reported(run_with_methods: RunScript) -> None:
    """RLIMIT_FSIZE also applies to memory files."""
    done = run_with_methods(
        """
        import resource, sys
        import numpy as np

        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        for method in METHODS:
            try:
                run_in_worker("numpy:zeros", 1_000_000, start_method=method)
            except WorkerError as error:
                print(error)
            try:
                print(run_in_worker(lambda array: 42, np.zeros(1_000_000), start_method=method))
            except WorkerStartError as error:
                print(error)
            print(run_in_worker("numpy:ones", 3, start_method=method))
        """
    )
    result = "no room for the result: OSError: [Errno 27] File too large"
    argument = "cannot start a worker: [Errno 27] File too large"
    # A fork inherits its arguments, so they need no memory file.
    assert done.stdout.splitlines() == [result, argument, "[1. 1. 1.]"] * 2 + [result, "42", "[1. 1. 1.]"]


def test_a_missing_python_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from flower_gpu.errors import WorkerStartError

    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(WorkerStartError, match=r"cannot start a worker: .*/nowhere/python"):
        run_in_worker("plain_tasks:answer", start_method="spawn")
    monkeypatch.undo()


def test_a_limit_of_processes_is_reported(run_script: RunScript, own_folder: str) -> None:
    """RLIMIT_NPROC does not apply to root, so the script becomes another user."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become a user without other processes")
    done = run_script(
        """
        import os, resource, sys
        from flower_gpu import WorkerStartError, run_in_worker
        folder, *methods = sys.argv[1:]
        for method in methods:
            run_in_worker("plain_tasks:answer", start_method=method)
        os.environ["FLOWER_GPU_STATE_DIR"] = folder
        before = os.listdir("/proc/self/fd")
        os.setresuid(54321, 54321, 54321)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        for method in methods:
            try:
                run_in_worker("plain_tasks:answer", start_method=method)
            except WorkerStartError as error:
                print(error, os.listdir("/proc/self/fd") == before)
        """,
        own_folder,
        *SUPERVISED,
        env=WITH_TASKS,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(SUPERVISED)
    for line in lines:
        assert "cannot start a worker: Resource temporarily unavailable; this account has " in line
        assert "and may have 1 (ulimit -u)" in line and line.endswith(" True")
        assert "Raise that limit, or let fewer workers run at a time" in line


def test_a_worker_does_not_inherit_signal_handlers(run_script: RunScript) -> None:
    """Flower's handlers would report the client's task as stopped when a worker is ended."""
    done = run_script(
        """
        import os, signal, sys
        from flower_gpu import WorkerDiedError, run_in_worker

        for number in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, lambda *_: print("the caller's handler", flush=True))
        signal.set_wakeup_fd(os.open("/dev/null", os.O_WRONLY | os.O_NONBLOCK))
        for method in sys.argv[1:]:
            for number in (signal.SIGTERM, signal.SIGALRM):
                try:
                    run_in_worker("crash_tasks:kill_itself", number, start_method=method)
                except WorkerDiedError as error:
                    print(error.exitcode)
        """,
        *SUPERVISED,
        env=WITH_TASKS,
    )
    assert done.stdout.splitlines() == [x for n in (15, 14) * 3 for x in ("the last words", str(-n))]


def test_buffered_output_of_the_caller_is_written_once(run_with_methods: RunScript) -> None:
    done = run_with_methods(
        """
        # A worker would write the buffered text when its copy of the stream is closed.
        sys.stdout = open(1, "w", closefd=False)
        for method in METHODS:
            sys.stdout.write("before ")
            run_in_worker("builtins:print", "in the worker", start_method=method)
            print("after")
        """
    )
    assert done.stdout == "before in the worker\nafter\n" * 3


def test_a_process_that_left_the_group_does_not_block_the_call(
    start_method: str, run: Run, tmp_path: Path
) -> None:
    """A process in its own session may go on writing into our pipe."""
    pid_file = tmp_path / "pid"

    def leave(reached: str) -> None:
        code = "import os\nwhile True: os.write(1, b'escaped' * 1000)"
        process = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
        pid_file.write_text(str(process.pid))
        Path(reached).touch()
        os.setsid()

    # The worker leads a group, so os.setsid fails. The worker's child has left the group.
    try:
        with pytest.raises(PermissionError):
            run_in_worker(leave, str(tmp_path / "first"), start_method=start_method)
    finally:
        with suppress(ProcessLookupError):  # The fork server may have ended it.
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert wait_until(lambda: not is_running(int(pid_file.read_text())))


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_a_time_limit_may_be_very_long(start_method: str, run: Run) -> None:
    """The limit is longer than a single wait in the kernel may be (24 days)."""
    assert run_in_worker("plain_tasks:answer", start_method=start_method, timeout_s=1e9) == 42


def test_a_time_limit_may_be_very_short(start_method: str, run: Run) -> None:
    for timeout_s in (1e-9, 0.001, 0.02):
        with pytest.raises(WorkerTimeoutError, match=r"no (result|worker) within timeout_s="):
            run_in_worker("time:sleep", 600, start_method=start_method, timeout_s=timeout_s)


def test_workers_are_supervised_without_pidfd_and_waitid(
    start_method: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS and old kernels, workers are supervised by polling."""
    if start_method == "forkserver":
        pytest.skip("needs pidfd_open")
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.delattr(os, "waitid")
    assert run_in_worker("plain_tasks:answer", start_method=start_method) == 42
    with pytest.raises(WorkerDiedError, match="exited with code 7"):
        run_in_worker("crash_tasks:os_exit", 7, start_method=start_method)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        run_in_worker("crash_tasks:die_with_children", start_method=start_method)
