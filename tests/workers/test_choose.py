"""The start method that ``auto`` chooses, in a script and in a ``flwr-clientapp``.

A real shared library takes the place of NVIDIA's driver.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forkservers
import pytest
from forkservers import Client, only_server, until_only

from flower_gpu.options import START_METHODS
from flower_gpu.workers import methods as start

pytestmark = forkservers.marks(fixture="folder")

# Like the driver, cuDeviceGetCount fails with CUDA_ERROR_NOT_INITIALIZED (3) before cuInit. A device reports
# no UUID (CUDA_ERROR_NOT_SUPPORTED, 801) until ``be`` has set it.
DRIVER = """
#include <string.h>
static int initialised, devices, is_known;
static unsigned char own[16];
void be(const unsigned char *uuid) { memcpy(own, uuid, 16); is_known = 1; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memcpy(uuid, own, 16);
    return is_known ? 0 : 801;
}
int cuInit(unsigned int count) { initialised = 1; devices = (int)count; return 0; }
int cuDeviceGetCount(int *count) { if (!initialised) return 3; *count = devices; return 0; }
"""

# Each case runs in a fork, because a process cannot undo the initialisation of CUDA.
SCRIPT = """
    import ctypes, json, os, sys
    from flower_gpu.errors import ConfigError
    from flower_gpu.frameworks.cuda_answers import initialized_cuda_devices
    from flower_gpu.workers import methods

    for driver, program, method, gpus in json.loads(sys.argv[1]):
        if os.fork():
            assert os.wait()[1] == 0
            continue
        sys.argv = [program]
        if driver:
            cuda = ctypes.CDLL(driver)
            if gpus is not None:
                cuda.cuInit(gpus)
        assert initialized_cuda_devices() == gpus
        try:
            print(methods.choose(method).name, flush=True)
        except ConfigError as error:
            print(error, flush=True)
        os._exit(0)
"""

CLIENT_APP = "/some/where/bin/flwr-clientapp"
SCRIPT_OF_USER = "client.py"
NO_LIBRARY, UNTOUCHED = "no library", "untouched"
REFUSED = (
    "start_method='fork' cannot be used: this process has initialised CUDA, so a fork of it could not use a "
    "GPU. Use 'auto' or 'spawn'"
)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    forkservers.compile_library(library, DRIVER, "-Wl,-soname,libcuda.so.1")
    return str(library)


CHOICES = [
    (CLIENT_APP, NO_LIBRARY, "auto", "fork"),
    (CLIENT_APP, UNTOUCHED, "auto", "fork"),
    (CLIENT_APP, 1, "auto", "spawn"),
    (CLIENT_APP, 2, "auto", "spawn"),
    (CLIENT_APP, 0, "auto", "spawn"),
    (SCRIPT_OF_USER, NO_LIBRARY, "auto", "forkserver"),
    (SCRIPT_OF_USER, UNTOUCHED, "auto", "forkserver"),
    (SCRIPT_OF_USER, 1, "auto", "forkserver"),
    (SCRIPT_OF_USER, 2, "auto", "forkserver"),
    ("", UNTOUCHED, "auto", "forkserver"),
    (SCRIPT_OF_USER, UNTOUCHED, "fork", "fork"),
    (SCRIPT_OF_USER, 1, "spawn", "spawn"),
    (CLIENT_APP, UNTOUCHED, "forkserver", "forkserver"),
    (CLIENT_APP, 1, "spawn", "spawn"),
    (CLIENT_APP, UNTOUCHED, "in-process", "in-process"),
    (CLIENT_APP, 1, "fork", REFUSED),
    (SCRIPT_OF_USER, 1, "fork", REFUSED),
]


def test_the_choice_depends_on_the_program_and_the_state_of_cuda(
    driver: str, run_script: Callable[..., Any]
) -> None:
    cases = [
        ("" if cuda == NO_LIBRARY else driver, program, method, cuda if isinstance(cuda, int) else None)
        for program, cuda, method, _ in CHOICES
    ]
    choices = run_script(SCRIPT, json.dumps(cases)).stdout.splitlines()
    assert [*zip(CHOICES, choices, strict=True)] == [(case, case[3]) for case in CHOICES]


def test_a_program_named_flwr_clientapp_forks(run_script: Callable[..., Any]) -> None:
    """A script with that file name forks its worker, so a lock can be passed without being pickled."""
    done = run_script(
        """
        import threading
        from flower_gpu import run_in_worker
        print(run_in_worker(lambda lock: lock.locked(), threading.Lock()))
        """,
        name="flwr-clientapp",
    )
    assert done.stdout == "False\n"


def test_every_name_that_settings_accept_is_a_start_method() -> None:
    assert start.METHODS.keys() == set(START_METHODS) - {"auto"}


# In a flwr-clientapp ----------------------------------------------------------------------------------------

# The server can import ``late`` only after a file has been created. Workers import it at once.
PACKAGES = {
    "by_name": "",
    "by_fork": "",
    "by_fork_of_it": "",
    "late": """
        import os, time
        while os.getsid(0) == os.getpid() and not os.path.exists(__file__ + ".now"):
            time.sleep(0.05)
        """,
}


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clientapp") / "venv"
    forkservers.make_environment(folder, PACKAGES)
    return folder


def clientapp(venv: Path, **env: str) -> Client:
    """Start a process that looks like a ``flwr-clientapp``."""
    client = Client(str(venv / "bin" / "python"), {"FLOWER_GPU_START_METHOD": "auto", **env})
    client.do("sys.argv[0] = '/somewhere/bin/flwr-clientapp'")
    return client


def test_a_named_function_runs_in_a_fork_of_the_fork_server(venv: Path) -> None:
    """Libraries that the worker of one message imports are loaded in the next worker."""
    with clientapp(venv) as app:
        assert app.call("tasks_forkserver:uses", "by_name") == [False]
    until_only(lambda status: "by_name" in status.libraries)
    with clientapp(venv) as app:
        assert app.call("tasks_forkserver:uses", "by_name") == [True]
        assert app.call("tasks_forkserver:server") == only_server().pid != app.pid


def test_calls_with_function_objects_or_unpicklable_arguments_are_forked(venv: Path) -> None:
    with clientapp(venv) as app:
        app.do("import threading, tasks_forkserver\nlock = threading.Lock()")
        assert app.do("answer = run_in_worker(tasks_forkserver.server)") == app.pid
        assert app.do("answer = run_in_worker(lambda lock: os.getppid(), lock)") == app.pid
        assert app.do("answer = run_in_worker('tasks_forkserver:parent_of', lock)") == app.pid
        assert "lower" not in app.errors()
        with pytest.raises(forkservers.CallError, match="WorkerStartError"):
            app.do("run_in_worker('tasks_forkserver:parent_of', lock, start_method='forkserver')")
        # An error of the task itself must not make it run twice.
        with pytest.raises(forkservers.CallError, match="WorkerStartError: cannot import the task"):
            app.call("no_such_module:task")


STARTS = {
    "an executor": "from concurrent import futures; pool = futures.ThreadPoolExecutor(1); pool.submit(int)",
    # Flower may start a thread at any time, so the order of threads has no meaning.
    "an executor, before a thread of Flower's": """
import threading
from concurrent import futures
pool = futures.ThreadPoolExecutor(1)
pool.submit(int)
def heartbeat():
    threading.Event().wait()
heartbeat.__module__ = "flwr.supercore.heartbeat"
threading.Thread(target=heartbeat, daemon=True).start()
""",
    "an executor that is shut down but still runs a task": """
import threading
from concurrent import futures
pool = futures.ThreadPoolExecutor(1)
is_over = threading.Event()
pool.submit(is_over.wait)
pool.shutdown(wait=False)
end = is_over.set
""",
    # Before a fork, OpenBLAS waits for a lock of that thread, which sometimes hangs.
    "matrix products": """
import itertools, threading, numpy
matrix = numpy.ones((200, 200))
threading.Thread(target=lambda: [matrix @ matrix for _ in itertools.count()], daemon=True).start()
""",
    "a library": "import ctypes; ctypes.CDLL(os.environ['THREADS']).start_thread()",
}


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp("threads") / "libthreads.so"
    forkservers.compile_library(library, forkservers.THREADS, "-fopenmp")
    return str(library)


@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS.keys())
def test_a_process_with_threads_of_the_app_is_not_forked(venv: Path, threads: str, starts: str) -> None:
    """A fork would not have these threads, and might wait for them for ever."""
    with clientapp(venv, THREADS=threads) as app:
        app.do("import tasks_forkserver")
        assert app.do("answer = run_in_worker(tasks_forkserver.server)") == app.pid
        app.do(f"end = int\n{starts}")
        assert app.do("answer = run_in_worker(tasks_forkserver.server)") == only_server().pid
        assert "lower" not in app.errors()
        app.do("end()")  # Otherwise the process would wait for the executor at exit.


@pytest.mark.parametrize("policy", ["passive", "active"])
def test_a_process_with_threads_of_openmp_and_openblas_is_forked(threads: str, policy: str) -> None:
    """With the policy ``active``, waiting threads of OpenMP use a core each."""
    env = {"FLOWER_GPU_START_METHOD": "auto", "THREADS": threads, "OMP_WAIT_POLICY": policy}
    with Client(env=env) as app:
        app.do("sys.argv[0] = '/somewhere/bin/flwr-clientapp'")
        begun = app.do(
            """
            import ctypes
            import numpy
            import tasks_forkserver
            (numpy.ones((500, 500)) @ numpy.ones((500, 500))).sum()
            library = ctypes.CDLL(os.environ["THREADS"])
            library.sum_in_two_threads()
            import time
            from concurrent import futures
            pool = futures.ThreadPoolExecutor(2)  # Flower has such a pool to fetch the parts of a message.
            pool.map(time.sleep, [0.3, 0.3])
            pool.shutdown(wait=False)
            import tqdm
            list(tqdm.tqdm(range(2)))  # The monitor thread of tqdm stays.
            answer = len(os.listdir("/proc/self/task"))
            """
        )
        assert begun > 1
        assert app.do("answer = run_in_worker(tasks_forkserver.server)") == app.pid
        assert app.do("answer = run_in_worker(lambda: library.sum_in_two_threads())") == 45


def test_the_process_is_forked_if_no_fork_server_can_start(venv: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with clientapp(venv, FLOWER_GPU_STATE_DIR=str(tmp_path / "file")) as app:
        assert app.call("tasks_forkserver:server") == app.pid
        assert "fork server" not in app.errors()


def test_libraries_that_a_fork_imports_are_learned(venv: Path) -> None:
    """Our ``flwr-clientapp`` is a worker itself. Its forks report to it which libraries they imported."""
    with Client(str(venv / "bin" / "python")) as starter:
        loaded = starter.call("tasks_forkserver:uses_in_fork", "by_fork", "by_fork_of_it")
        assert loaded == [[False], [False, False]]
        until_only(lambda status: {"by_fork", "by_fork_of_it"} <= set(status.libraries))
        assert starter.call("tasks_forkserver:uses_in_fork", "by_fork", "by_fork_of_it") == [
            [True],
            [True] * 2,
        ]


def test_the_next_message_of_a_run_waits_for_the_libraries_of_the_previous_message(
    venv: Path, tmp_path: Path
) -> None:
    """Messages of another run do not wait, because they may not need these libraries."""
    marker = forkservers.site_packages(venv) / "late" / "__init__.py.now"
    runs = [tmp_path / name for name in ("this", "other")]
    for run in runs:
        run.mkdir()
    with (
        clientapp(venv, FLOWER_GPU_RUN_DIR=str(runs[0])) as first,
        clientapp(venv, FLOWER_GPU_RUN_DIR=str(runs[0])) as second,
        clientapp(venv, FLOWER_GPU_RUN_DIR=str(runs[1])) as other,
    ):
        assert first.call("tasks_forkserver:uses", "late") == [False]
        second.send("tasks_forkserver:uses", "late")
        assert other.call("tasks_forkserver:uses", "late") == [False]
        time.sleep(0.5)  # If ``second`` did not wait, it would have imported the library now.
        marker.touch()
        assert second.receive() == [True]
