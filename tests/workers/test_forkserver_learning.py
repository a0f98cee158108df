"""Libraries that a fork server loads for all workers after a worker imported them or the user named them."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from pathlib import Path

import forkservers
import pytest
from forkservers import Client, only_server, until_only
from processes import is_running, wait_until
from test_choose import driver as driver

import flower_gpu
from flower_gpu.workers.forkserver import control
from flower_gpu.workers.forkserver.libraries import Growth

pytestmark = forkservers.marks(fixture="folder")


PACKAGES = {
    "harmless": "VALUE = 1\n",
    # In a worker, its import never ends. Like large libraries, it imports other modules meanwhile.
    "slow": """
        import os, time
        from contextlib import suppress
        from importlib import import_module
        while os.getsid(0) != os.getpid():
            time.sleep(0.05)
            with suppress(ImportError):
                import_module("slow.nothing")
        """,
    "harmless_too": "import harmless\nVALUE = 2\n",
    "touches_cuda": 'import ctypes, os\nctypes.CDLL(os.environ["DRIVER"]).cuInit(1)\nVALUE = 3\n',
    "starts_thread": """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        VALUE = 4
        """,
    "crashes": "import os, signal\nif os.getsid(0) == os.getpid(): os.kill(os.getpid(), signal.SIGSEGV)\n",
    # In a server, its import ends once a file exists.
    "gated": """
        import os, time
        while os.getsid(0) == os.getpid() and not os.path.exists(__file__ + ".open"):
            time.sleep(0.05)
        """,
    "hangs": "import os, time\nif os.getsid(0) == os.getpid(): time.sleep(600)\n",
    "breaks_later": 'import os\nif os.path.exists(__file__ + ".broken"): raise RuntimeError("broken")\n',
    "logs": 'import logging\nlogging.basicConfig(format="of a library: %(message)s", level=logging.INFO)\n',
    "compiled": "from compiled import native\n",
    "compiled_by_name": "",
    "hangs_later": 'import os, time\nif os.path.exists(__file__ + ".broken"): time.sleep(600)\n',
}


# An extension module that starts a thread while it is created, before its code runs, as polars does.
NATIVE = """
#include <Python.h>
#include <pthread.h>
#include <unistd.h>

static void *wait_for_ever(void *unused) { for (;;) pause(); return unused; }
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "native", NULL, 0, NULL};

PyMODINIT_FUNC PyInit_native(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, wait_for_ever, NULL);
    return PyModule_Create(&module);
}
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with libraries of all kinds."""
    folder = tmp_path_factory.mktemp("learning") / "venv"
    forkservers.make_environment(folder, PACKAGES)
    return folder


@pytest.fixture(scope="module")
def python(environment: Path) -> str:
    return str(environment / "bin" / "python")


def learn(caller: Client, *modules: str) -> control.Status:
    """Import modules in a worker, and return the server's status once it has learned them."""
    caller.call("tasks_forkserver:uses", *modules)
    return until_only(lambda status: {name.partition(".")[0] for name in modules} <= set(status.libraries))


class TestLibraries:
    def test_a_library_that_a_worker_imported_is_loaded_in_the_next_worker(self, python: str) -> None:
        with Client(python) as first, Client(python) as second:
            assert first.call("tasks_forkserver:uses", "harmless_too") == [False]
            server = learn(first, "harmless", "harmless_too")
            for caller in (first, second):
                assert caller.call("tasks_forkserver:loaded_before", "harmless", "harmless_too") == [True] * 2
                assert caller.call("tasks_forkserver:server") == server.pid
            assert server.users == 1  # The other caller has made its first call later.
            assert not control.stop(if_unused=True)
            # The second server is a fork of the first. A worker's stack shows neither of them.
            stack = first.call("tasks_forkserver:stack")
            assert stack[:2] == ["<module>", "main"] and stack[-1] == "stack"
            assert not {"_on_fork", "_on_learn", "_grow"} & set(stack)
            # Workers do not inherit changes that a library made to the root logger.
            learn(first, "logs")
            assert first.call("tasks_forkserver:root_logger", "logs") == [[], "WARNING"]

    def test_modules_of_an_editable_install_of_this_package_are_learned(self, python: str) -> None:
        with forkservers.own_servers(light=True), Client(python) as caller:
            assert caller.call("tasks_forkserver:uses", "flower_gpu.calls.grants") == [True]
            server = only_server()
            assert caller.call("tasks_forkserver:uses", "flower_gpu.watch.fields") == [False]
            assert until_only(lambda status: "flower_gpu" in status.libraries).pid != server.pid
            assert caller.call("tasks_forkserver:uses", "flower_gpu.watch.fields") == [True]

    def test_a_worker_that_is_ended_during_an_import_has_reported_it(self, python: str) -> None:
        with forkservers.own_servers(light=True), Client(python) as caller:
            assert caller.call("tasks_forkserver:server") == only_server().pid
            # A short limit keeps the test short. On a busy machine, the call is repeated with a longer limit.
            for timeout_s in (2, 8, 32):
                with pytest.raises(forkservers.CallError, match="WorkerTimeoutError") as caught:
                    caller.call("tasks_forkserver:uses", "slow", timeout_s=timeout_s)
                says = rf"within timeout_s={timeout_s}, of which at least (\S+) s went into imports"
                if match := re.search(says, str(caught.value)):
                    break
            assert match and timeout_s / 16 <= float(match[1]) <= timeout_s, caught.value
            until_only(lambda status: "slow" in status.libraries)
            assert caller.call("tasks_forkserver:uses", "slow", timeout_s=60) == [True]

    def test_imports_during_the_start_of_a_successor_are_learned_as_well(
        self, python: str, environment: Path
    ) -> None:
        """The successor was forked before. The second call is of another kind, so it does not wait."""
        gate = forkservers.site_packages(environment) / "gated" / "__init__.py.open"
        with forkservers.own_servers(light=True), Client(python) as caller, Client(python) as other:
            assert caller.call("tasks_forkserver:uses", "gated") == [False]
            server = only_server().pid
            assert other.call("tasks_forkserver:attribute", "harmless", "VALUE") == [1, False]
            assert only_server().pid == server
            gate.touch()
            successor = until_only(lambda status: "harmless" in status.libraries)
            assert successor.pid != server and "gated" in successor.libraries

    def test_a_process_can_name_libraries_before_its_first_call(self, python: str) -> None:
        names = ("harmless_too", "harmless_too.VALUE", "nowhere", "starts_thread", "tasks_forkserver", "")
        with Client(python) as caller:
            caller.do(
                f"""
                from flower_gpu.workers.forkserver import client
                for _ in range(2):
                    client.learn({names!r})
                """
            )
            (server,) = control.status()
            assert {"harmless_too"} <= set(server.libraries)
            assert server.refused == ["starts_thread"]
            assert not {"nowhere", "tasks_forkserver"} & set(server.libraries)
            assert caller.call("tasks_forkserver:loaded_before", "harmless_too", "harmless") == [True, True]
            assert caller.call("tasks_forkserver:server") == server.pid

    def test_learned_libraries_are_kept_for_the_next_server(self, python: str, tmp_path: Path) -> None:
        """Modules of the user are not learned."""
        (tmp_path / "own_module.py").write_text("import harmless\n")
        (tmp_path / "own_package").mkdir()
        (tmp_path / "own_package" / "__init__.py").touch()
        with Client(python) as caller:
            caller.do(f"sys.path.insert(0, {str(tmp_path)!r})")
            for _ in range(2):
                loaded = caller.call("tasks_forkserver:uses", "own_module", "own_package", "harmless")
                assert loaded[:2] == [False, False]
            learn(caller, "harmless")
            assert not {"own_module", "own_package", "tasks_forkserver"} & set(only_server().libraries)
            (server,) = control.stop(wait_s=20)
            assert caller.call("tasks_forkserver:loaded_before", "harmless") == [True]
            assert only_server().pid != server

    def test_a_harmful_library_is_not_learned(self, python: str, driver: str) -> None:
        """Each worker imports it itself."""
        harmful = ("touches_cuda", "starts_thread", "crashes")
        with Client(python, {"DRIVER": driver}) as caller:
            server = caller.call("tasks_forkserver:server")
            for library in harmful:
                assert caller.call("tasks_forkserver:uses", library) == [False]
                refusing = until_only(lambda status, library=library: library in status.refused)
                assert (refusing.pid, library in refusing.libraries) == (server, False)
                assert caller.call("tasks_forkserver:uses", library) == [False]
            assert only_server().pid == server
            learn(caller, "harmless")
            assert not {*harmful} & {*only_server().libraries}

    @pytest.mark.parametrize("module", ["compiled", "compiled_by_name.native"])
    def test_an_extension_that_starts_a_thread_is_tried_once(
        self, module: str, python: str, environment: Path
    ) -> None:
        """This includes an import by its own name, when no other module is being imported."""
        library = module.partition(".")[0]
        native = forkservers.site_packages(environment) / library / "native.so"
        forkservers.compile_library(native, NATIVE, f"-I{sysconfig.get_paths()['include']}")
        with forkservers.own_servers(light=True) as folder, Client(python) as caller:
            server = caller.call("tasks_forkserver:server")
            for _ in range(3):
                assert caller.call("tasks_forkserver:uses", module) == [False]
                assert until_only(lambda status: library in status.refused).pid == server
            (log,) = folder.glob("*.log")
            assert log.read_text().count("importing it starts a thread") == 1

    @pytest.mark.parametrize(
        ("reported", "refused"),
        [
            ('["a"]', {"a"}),
            ('["b", "of another"]', {"b", "of another"}),
            ("[]", {"a", "b"}),
            ('["of another"]', {"a", "b", "of another"}),
            ("", {"a", "b"}),
            ("null", None),
        ],
    )
    def test_each_failed_trial_refuses_at_least_one_of_its_libraries(
        self, reported: str, refused: set[str] | None
    ) -> None:
        read, write = os.pipe()
        os.write(write, reported.encode())
        os.close(write)
        assert Growth(0, read, ["a.one", "a.two", "b"], deadline=0).refused() == refused

    def test_a_trial_does_not_keep_an_unused_server_alive(self, python: str) -> None:
        with forkservers.own_servers(idle_s=1, light=True):
            with Client(python) as caller:
                assert caller.call("tasks_forkserver:uses", "hangs") == [False]
                server = only_server().pid
            assert wait_until(lambda: not is_running(server), timeout_s=60)

    def test_a_caller_waits_once_for_a_trial_and_says_why(self, python: str) -> None:
        with forkservers.own_servers(light=True), Client(python) as caller:
            caller.do(
                """
                from flower_gpu.workers.forkserver import client
                client.LEARN_S, os.environ["FLOWER_GPU_SAY_WAIT_S"] = 1.0, "0.2"
                """
            )
            for _ in range(3):
                assert caller.call("tasks_forkserver:uses", "hangs") == [False]
            reason = "still waiting: the fork server imports hangs, for at most 1 s"
            assert caller.errors().count(reason) == 1

    def test_a_library_whose_import_hangs_is_refused(self, python: str, tmp_path: Path) -> None:
        """Meanwhile the server forks workers. It ends the trial at a limit, and stops at once on request."""
        shutil.copytree(Path(flower_gpu.__file__).parent, tmp_path / "flower_gpu")
        source = tmp_path / "flower_gpu" / "workers" / "forkserver" / "server.py"
        assert source.read_text().count("_TRIAL_S = 300.0") == 1
        source.write_text(source.read_text().replace("_TRIAL_S = 300.0", "_TRIAL_S = 2.0"))
        path = os.pathsep.join([str(tmp_path), forkservers.WITH_TASKS["PYTHONPATH"]])
        with forkservers.own_servers(light=True), Client(python, {"PYTHONPATH": path}) as caller:
            assert caller.do("import flower_gpu; answer = flower_gpu.__file__").startswith(str(tmp_path))
            server = caller.call("tasks_forkserver:server")
            assert caller.call("tasks_forkserver:uses", "hangs") == [False]
            assert caller.call("tasks_forkserver:server") == server
            until_only(lambda status: "hangs" in status.refused)
            assert caller.call("tasks_forkserver:server") == server
        with forkservers.own_servers(light=True), Client(python) as caller:
            assert caller.call("tasks_forkserver:uses", "hangs") == [False]
            (server,) = control.stop()
            assert wait_until(lambda: not is_running(server))

    @pytest.mark.parametrize("library", ["breaks_later", "hangs_later"])
    def test_a_learned_library_that_becomes_harmful_is_left_out(
        self, library: str, python: str, environment: Path
    ) -> None:
        """The next server starts without this library, and no call fails."""
        marker = forkservers.site_packages(environment) / library / "__init__.py.broken"
        with forkservers.own_servers(light=True), Client(python) as caller:
            learn(caller, library)
            control.stop(wait_s=20)
            if library == "hangs_later":
                caller.do("from flower_gpu.workers.forkserver import program; program._START_S = 10")
            marker.touch()
            try:
                assert caller.call("tasks_forkserver:loaded_before", library) == [False]
                assert only_server().libraries == []
            finally:
                marker.unlink()

    def test_no_call_fails_while_servers_replace_each_other(self, python: str, environment: Path) -> None:
        site = forkservers.site_packages(environment)
        new = [f"another{number}" for number in range(3)]
        for name in new:
            forkservers.install(site, name, "import time; time.sleep(0.2)\n")
        with forkservers.own_servers(light=True), Client(python) as learning, Client(python) as busy:
            learning.call("tasks_forkserver:server")
            busy.do(
                """
                import threading
                servers, errors, done = set(), [], threading.Event()
                def work():
                    while not done.is_set():
                        try:
                            servers.add(run_in_worker("tasks_forkserver:nap", 0.05))
                        except BaseException as error:
                            errors.append(repr(error))
                threads = [threading.Thread(target=work) for _ in range(4)]
                for thread in threads: thread.start()
                """
            )
            pids = [learn(learning, name).pid for name in new]
            servers, errors = busy.do(
                "done.set(); [thread.join() for thread in threads]; answer = [list(servers), errors]"
            )
            assert errors == []
            assert len(set(pids)) == len(new) and len(servers) > 1
            assert wait_until(lambda: [pid for pid in pids if is_running(pid)] == pids[-1:])


class TestEnvironments:
    def test_an_update_leads_to_a_new_server_and_ends_the_old_server(
        self, environment: Path, python: str
    ) -> None:
        package = forkservers.site_packages(environment) / "updated" / "__init__.py"
        with forkservers.own_servers(idle_s=1, light=True):
            forkservers.install(package.parents[1], "updated", "VERSION = 1\n")
            with Client(python) as caller:
                old = learn(caller, "updated").pid
                assert caller.call("tasks_forkserver:attribute", "updated", "VERSION") == [1, True]
                # An update with pip changes both the module and the folder with the metadata.
                package.write_text("VERSION = 'two'\n")
                (package.parents[1] / "updated-1.0.dist-info").rename(
                    package.parents[1] / "updated-2.0.dist-info"
                )
                assert caller.call("tasks_forkserver:attribute", "updated", "VERSION")[0] == "two"
                new = caller.call("tasks_forkserver:server")
                assert new != old
            assert wait_until(lambda: not is_running(old) and not is_running(new))
