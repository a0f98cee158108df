"""Functions that the user has run once for all workers (``preload=``), and what they must not do."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forkservers
import pytest
from forkservers import CallError, Client
from processes import is_running, wait_until
from test_choose import driver as driver

from flower_gpu.workers.forkserver import control

pytestmark = forkservers.marks()

Start = Callable[..., Client]

# Each call of ``load`` appends a line to a file next to the module.
TASK = """
import os
import time
from pathlib import Path

import numpy as np

DATA = {}
LOG = Path(__file__).with_name("log")

def load(number=1, **more):
    with LOG.open("a") as file:
        file.write(f"{number} {os.getpid()}\\n")
    DATA["number"], DATA["more"] = number, more

def load_more():
    DATA["doubled"] = 2 * DATA["number"]

def load_much():
    DATA["array"] = np.ones(25_000_000)

def load_slowly():
    LOG.with_name("started").touch()
    while not LOG.with_name("go").exists():
        time.sleep(0.01)
    DATA["number"] = 7

def load_nothing():
    raise OSError("the disk with the data is not mounted")

def exit():
    raise SystemExit(3)

def crash():
    os.abort()

def touch_cuda():
    import ctypes
    ctypes.CDLL(os.environ["DRIVER"]).cuInit(1)

def start_executor():
    from concurrent.futures import ThreadPoolExecutor
    DATA["pool"] = ThreadPoolExecutor(1)
    DATA["pool"].submit(int)

def start_thread():
    import ctypes
    ctypes.CDLL(os.environ["THREADS"]).start_thread()

def compute_with_openmp():
    import ctypes
    DATA["library"] = ctypes.CDLL(os.environ["THREADS"])
    DATA["number"] = DATA["library"].sum_in_two_threads()

def sums():
    return [DATA["number"], DATA["library"].sum_in_two_threads()]

def data():
    return {name: value for name, value in DATA.items() if name != "array"}

def number():
    return DATA.get("number")

def change():
    DATA["number"] = "changed"
    return os.getpid()

def private_mb():
    total = float(DATA["array"].sum())
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines}
    return [total, sizes["Private_Clean"] + sizes["Private_Dirty"], sizes["Rss"]]
"""


@pytest.fixture(scope="module", autouse=True)
def state() -> Iterator[Path]:
    with forkservers.own_servers(idle_s=5, light=True) as folder, Client() as client:
        client.call("tasks_forkserver:server")
        yield folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "loading_task.py").write_text(TASK)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Client]]:
    """Start processes that can import the task."""
    clients = []
    path = os.pathsep.join([str(folder), forkservers.WITH_TASKS["PYTHONPATH"]])

    def begin(**env: str) -> Client:
        clients.append(Client(env={"PYTHONPATH": path, **env}))
        return clients[-1]

    yield begin
    for client in clients:
        client.kill()


def lines(folder: Path) -> list[str]:
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []


class TestLoading:
    def test_data_are_loaded_once_for_all_calls_of_all_processes(self, start: Start, folder: Path) -> None:
        """The first calls of the processes begin at the same time."""
        clients = [start() for _ in range(3)]
        for _ in range(3):
            for caller in clients:
                caller.send("loading_task:number", preload="loading_task:load")
            assert [caller.receive() for caller in clients] == [1] * 3
        assert len(lines(folder)) == 1
        number, pid = lines(folder)[0].split()
        (server,) = [status for status in control.status() if status.pid == int(pid)]
        assert (number, server.calls, server.preload) == ("1", 9, ["loading_task:load"])

    def test_preload_accepts_functions_modules_and_arguments(self, start: Start) -> None:
        caller = start()
        more = {"number": 5, "a": [1, None]}
        both = [["loading_task:load", {"number": 4}], "loading_task:load_more"]
        forms: list[tuple[Any, dict[str, Any]]] = [
            (["loading_task:load", more], {"number": 5, "more": {"a": [1, None]}}),
            (["loading_task:load", "loading_task:load_more"], {"number": 1, "more": {}, "doubled": 2}),
            ("loading_task", {}),
            (both, {"number": 4, "more": {}, "doubled": 8}),
        ]
        for preload, expected in forms:
            assert caller.call("loading_task:data", preload=preload) == expected
        assert caller.call("loading_task:data", preload=both, start_method="spawn") == expected

    def test_other_arguments_are_other_data(self, start: Start, folder: Path) -> None:
        caller = start()
        for number in (1, 2, 1, 2):
            preload = ["loading_task:load", {"number": number}]
            assert caller.call("loading_task:number", preload=preload) == number
            caller.call("loading_task:change", preload=preload)  # It changes only its own copy.
        assert len(lines(folder)) == 2
        assert caller.call("loading_task:number") is None  # This call has no preload.

    def test_an_edited_module_is_loaded_again(self, start: Start, folder: Path) -> None:
        caller = start()
        assert caller.call("loading_task:number", preload="loading_task:load") == 1
        (folder / "loading_task.py").write_text(TASK.replace("number=1", "number=11"))
        assert caller.call("loading_task:number", preload="loading_task:load") == 11

    def test_large_data_is_shared(self, start: Start) -> None:
        """Workers share the 200 MB that were loaded for them."""
        caller = start()
        for total, private_mb, resident_mb in [
            caller.call("loading_task:private_mb", preload="loading_task:load_much") for _ in range(2)
        ]:
            assert total == 25_000_000
            assert private_mb < 60 < 200 < resident_mb

    def test_data_are_loaded_once_for_all_messages_of_a_clientapp(self, start: Start, folder: Path) -> None:
        """A fork of the clientapp would load the data for each message, so `auto` uses the fork server."""
        for _ in range(2):
            app = start(FLOWER_GPU_START_METHOD="auto")
            app.do("sys.argv[0] = '/somewhere/bin/flwr-clientapp'")
            assert app.call("loading_task:number", preload="loading_task:load") == 1
            app.close()
        assert len(lines(folder)) == 1


class TestFailures:
    def test_an_error_is_reported_to_the_caller(self, start: Start) -> None:
        caller = start()
        for function, says in {
            "loading_task:load_nothing": "OSError: the disk with the data is not mounted",
            "loading_task:missing": "has no 'missing'",
            "missing_task:load": "No module named 'missing_task'",
            "loading_task:exit": "SystemExit: 3",
            "loading_task:crash": "it ended; its log is in",
        }.items():
            with pytest.raises(CallError) as caught:
                caller.call("loading_task:number", preload=function)
            assert str(caught.value).startswith("WorkerStartError: ")
            assert says in str(caught.value) and f"preload {function}" in str(caught.value)
        assert caller.call("loading_task:number", preload="loading_task:load") == 1

    def test_cuda_is_refused(self, start: Start, driver: str) -> None:
        caller = start(DRIVER=driver)
        with pytest.raises(CallError, match="touch_cuda initialised CUDA, so that no worker could use a GPU"):
            caller.call("loading_task:number", preload="loading_task:touch_cuda")
        options = {"preload": ["loading_task:touch_cuda", "loading_task:load"], "start_method": "auto"}
        for _ in range(2):  # A spawned worker may initialise CUDA.
            assert caller.call("loading_task:number", **options) == 1
        assert caller.errors().count("workers are spawned, which is slower") == 1

    def test_threads_are_refused_but_not_those_of_openmp(self, start: Start, tmp_path: Path) -> None:
        """A fork would wait for the missing threads for ever, but OpenMP starts new ones."""
        library = tmp_path / "libthreads.so"
        forkservers.compile_library(library, forkservers.THREADS, "-fopenmp")
        caller = start(THREADS=str(library))
        for function, origin in (
            ("start_executor", "thread ThreadPoolExecutor-0_0"),
            ("start_thread", library.name),
        ):
            message = f"{function} starts threads in the process that workers are forked from ({origin})"
            with pytest.raises(CallError, match=re.escape(message)):
                caller.call("loading_task:number", preload=f"loading_task:{function}")
        assert caller.call("loading_task:sums", preload="loading_task:compute_with_openmp") == [45, 45]
        options = {"preload": ["loading_task:start_executor", "loading_task:load"], "start_method": "auto"}
        assert caller.call("loading_task:number", **options) == 1  # A spawned worker may start threads.

    def test_loading_may_take_longer_than_a_call(self, start: Start, folder: Path) -> None:
        caller = start()
        options = {"preload": "loading_task:load_slowly"}
        with pytest.raises(CallError, match=r"WorkerTimeoutError.*load_slowly was not ready in time"):
            caller.call("loading_task:number", timeout_s=0.5, **options)
        assert wait_until((folder / "started").exists)
        with pytest.raises(CallError, match=r"WorkerTimeoutError.*being started by another process"):
            caller.call("loading_task:number", timeout_s=0.5, **options)
        (folder / "go").touch()
        assert caller.call("loading_task:number", **options) == 7

    def test_a_server_waits_for_a_caller_slower_than_its_idle_limit(self, start: Start, folder: Path) -> None:
        """A caller may be slow on a busy host. The data are loaded only once."""
        with forkservers.own_servers(idle_s=0.1, light=True):
            caller = start()
            caller.do(
                """
                import time
                from contextlib import contextmanager
                from flower_gpu.workers.forkserver import program

                said_ready = program.said_ready

                @contextmanager
                def slowly(*arguments):
                    with said_ready(*arguments) as ready:
                        yield ready
                    time.sleep(2.5)

                program.said_ready = slowly
                """
            )
            assert caller.call("loading_task:number", preload="loading_task:load") == 1
            assert len(lines(folder)) == 1

    def test_a_caller_can_be_interrupted_while_data_are_loaded(self, start: Start, folder: Path) -> None:
        caller = start()
        caller.send("loading_task:number", preload="loading_task:load_slowly")
        assert wait_until((folder / "started").exists)
        os.kill(caller.pid, signal.SIGINT)
        with pytest.raises(CallError, match="KeyboardInterrupt"):
            caller.receive()
        (folder / "go").touch()
        assert caller.call("loading_task:number", preload="loading_task:load_slowly") == 7

    def test_a_server_that_is_killed_or_hangs_is_replaced(self, start: Start, folder: Path) -> None:
        """The server with the data was forked from the server with the libraries. Both can be replaced."""
        caller = start()
        caller.do(
            "from flower_gpu.workers.forkserver import client; client._SAY_S, client._ANSWER_S = 0.5, 3.0"
        )
        for number, sent in enumerate([signal.SIGKILL, signal.SIGSTOP]):
            preload = ["loading_task:load", {"number": number}]
            assert caller.call("loading_task:number", preload=preload) == number
            data = caller.call("tasks_forkserver:server", preload=preload)
            os.kill(data, sent)
            assert caller.call("loading_task:number", preload=preload) == number
            assert not is_running(data)
            base = caller.call("tasks_forkserver:server")
            os.kill(base, sent)
            other = ["loading_task:load", {"number": number + 10}]
            assert caller.call("loading_task:number", preload=other) == number + 10
            assert not is_running(base)
        assert sorted(line.split()[0] for line in lines(folder)) == sorted(["0", "0", "10", "1", "1", "11"])
