"""A worker of the fork server equals a new process of its caller, whatever the server has loaded."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import forkservers
import pytest
from forkservers import Client
from processes import wait_until
from run_programs import run_python

from flower_gpu.workers.forkserver import control, fitness

pytestmark = forkservers.marks(fixture="folder")

PACKAGES = {
    "reads_variable": 'import os\nVALUE = os.environ.get("READS_HOME", "none")\n',
    "sets_variable": 'import os\nos.environ["SETS_ITSELF"] = "by the library"\n',
    "sets_and_reads": """
        import os
        os.environ["SETS_AND_READS"] = "by the library"
        VALUE = os.environ["SETS_AND_READS"]
        """,
    "has_default": 'import os\nVALUE = os.environ.setdefault("HAS_DEFAULT", "the default")\n',
    "lists_variables": "import os, subprocess\nVALUE = len(dict(os.environ))\n",
}

LOADS_DATA = """
import os
from pathlib import Path

DATA = []

def load():
    value = os.environ["READS_HOME"]
    with Path(os.environ["LOADS_FOLDER"], "log").open("a") as file:
        print(value, file=file)
    DATA.append(value)
"""


@pytest.fixture(scope="module")
def python(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with additional libraries."""
    return forkservers.make_environment(tmp_path_factory.mktemp("fitness") / "venv", PACKAGES)


@pytest.fixture(scope="module")
def first(python: str) -> Iterator[Client]:
    """A caller that sets no special variables."""
    with Client(python) as caller:
        yield caller


@pytest.fixture
def learned(python: str, first: Client) -> str:
    """Return the interpreter, once the server of the first caller has all libraries."""
    is_loaded = lambda: all(first.call("tasks_forkserver:uses", *PACKAGES))  # noqa: E731
    assert wait_until(is_loaded, timeout_s=60), control.status()
    return python


class TestVariables:
    def test_a_library_sees_the_variables_of_its_caller(self, learned: str) -> None:
        """Each caller gets the value of its own variable, before and after the server learns the library."""
        with Client(learned) as plain, Client(learned, {"READS_HOME": "one"}) as custom:
            assert plain.call("tasks_forkserver:attribute", "reads_variable", "VALUE") == ["none", True]
            values = [custom.call("tasks_forkserver:attribute", "reads_variable", "VALUE") for _ in range(3)]
            assert [value for value, _ in values] == ["one"] * 3
            assert wait_until(
                lambda: custom.call("tasks_forkserver:attribute", "reads_variable", "VALUE") == ["one", True]
            )
            assert plain.call("tasks_forkserver:attribute", "reads_variable", "VALUE") == ["none", True]
            plain.do("os.environ['READS_HOME'] = 'two'")
            assert plain.call("tasks_forkserver:attribute", "reads_variable", "VALUE")[0] == "two"
            plain.do("del os.environ['READS_HOME']")
            assert plain.call("tasks_forkserver:attribute", "reads_variable", "VALUE")[0] == "none"

    def test_data_are_loaded_only_in_a_server_that_fits(self, learned: str, tmp_path: Path) -> None:
        """Otherwise, a caller with another value of a variable would load its data twice."""
        (tmp_path / "loads_data.py").write_text(LOADS_DATA)
        for value in ("three", "four"):
            env = {"READS_HOME": value, "LOADS_FOLDER": str(tmp_path)}
            with Client(learned, env) as caller:
                caller.do(f"sys.path.append({str(tmp_path)!r})")
                task = ("tasks_forkserver:attribute", "loads_data", "DATA")
                assert caller.call(*task, preload="loads_data:load") == [[value], True]
                assert caller.call("tasks_forkserver:attribute", "reads_variable", "VALUE")[0] == value
        assert (tmp_path / "log").read_text().splitlines() == ["three", "four"]

    def test_a_new_folder_of_flower_needs_no_new_server(self, tmp_path: Path) -> None:
        """``launch`` creates it for each run. At import, only Flower's command line depends on it."""
        program = """
            import os, sys
            from flower_gpu.workers.forkserver import identity
            from flower_gpu.workers.forkserver.fitness import EnvironmentUse
            use = EnvironmentUse()
            with use.noted():
                from flwr.supercore.credential_store import file_credential_store
            assert str(file_credential_store.CREDENTIAL_FILE_PATH).startswith(os.environ["FLWR_HOME"])
            others = {**os.environ, "FLWR_HOME": "another", "HOME": "another"}
            print(use.differs_from(identity.digests(others, others)))
            """
        env = {**os.environ, "FLWR_HOME": str(tmp_path)}
        done = run_python(textwrap.dedent(program), env=env, check=True)
        assert "FLWR_HOME" not in done.stdout

    def test_a_library_sees_the_variables_of_the_call(self, learned: str) -> None:
        with Client(learned) as caller:
            for value in ("three", "four", "three"):
                result = caller.call(
                    "tasks_forkserver:attribute", "reads_variable", "VALUE", env={"READS_HOME": value}
                )
                assert result[0] == value
            assert caller.call("tasks_forkserver:attribute", "reads_variable", "VALUE")[0] == "none"

    def test_a_library_sees_variables_that_the_task_sets_before_its_imports(
        self, learned: str, tmp_path: Path
    ) -> None:
        """Many task modules first set a variable and then import the library that reads it."""
        (tmp_path / "setting_task.py").write_text(
            'import os\nos.environ["READS_HOME"] = "of the task"\nimport reads_variable\n'
            "def value():\n    return reads_variable.VALUE\n"
        )
        with Client(learned) as caller:
            caller.do(f"sys.path.append({str(tmp_path)!r})")
            assert caller.call("setting_task:value", start_method="spawn") == "of the task"
            for _ in range(3):
                assert caller.call("setting_task:value") == "of the task"

    def test_a_task_that_sets_another_value_in_each_worker_is_spawned(
        self, learned: str, tmp_path: Path
    ) -> None:
        """No server could have read that value before."""
        (tmp_path / "restless_task.py").write_text(
            'import os\nos.environ["READS_HOME"] = str(os.getpid())\nimport reads_variable\n'
            "def value():\n    return reads_variable.VALUE == str(os.getpid())\n"
        )
        with Client(learned) as caller:
            caller.do(f"sys.path.append({str(tmp_path)!r})")
            assert [caller.call("restless_task:value", start_method="auto") for _ in range(2)] == [True, True]

    def test_variables_that_libraries_set_need_no_new_import(self, learned: str) -> None:
        """A library that reads its own variable is not imported again. A caller's value takes precedence."""
        variable, value_of = "tasks_forkserver:variables", "tasks_forkserver:attribute"
        with Client(learned, {"SOMETHING_ELSE": "1"}) as caller:
            assert caller.call(variable, "SETS_ITSELF") == ["by the library"]
            assert caller.call(variable, "SETS_ITSELF", env={"SETS_ITSELF": "mine"}) == ["mine"]
            for name in ("SETS_AND_READS", "HAS_DEFAULT"):
                result = caller.call(value_of, name.lower(), "VALUE")
                assert result == [caller.call(variable, name)[0], True]
                assert result[0] == caller.call(value_of, name.lower(), "VALUE", start_method="spawn")[0]
            # A copy of all variables does not count as a use of each variable.
            assert caller.call(value_of, "lists_variables", "VALUE")[1]
        with Client(learned, {"HAS_DEFAULT": "mine"}) as caller:
            assert [caller.call(value_of, "has_default", "VALUE")[0] for _ in range(2)] == ["mine"] * 2

    def test_all_variables_equal_those_of_a_new_process(self, python: str) -> None:
        """Python and the C library agree, including odd bytes and removed variables."""
        with Client(python, {"TO_BE_REMOVED": "1"}) as caller:
            caller.do(
                """
                del os.environ["TO_BE_REMOVED"]
                os.environb[b"NOT_UTF_8"] = bytes(range(128, 256))
                os.environ.update(EMPTY="", EQUALS="a=b=c", NEW="new", LONG="x" * 100_000)
                """
            )
            call = ("tasks_forkserver:environment",)
            (python_sees, c_sees), (spawned, _) = caller.call(*call), caller.call(*call, start_method="spawn")
            assert python_sees == c_sees
            texts = [bytes.fromhex(entry) for entry in python_sees]
            assert b"NOT_UTF_8=" + bytes(range(128, 256)) in texts
            assert not [text for text in texts if text.startswith(b"TO_BE_REMOVED")]
            by_libraries = {b"SETS_ITSELF", b"SETS_AND_READS", b"HAS_DEFAULT", b"LC_CTYPE"}
            differing = {bytes.fromhex(entry) for entry in set(python_sees) ^ set(spawned)}
            assert {entry.partition(b"=")[0] for entry in differing} <= by_libraries


class TestShadows:
    def test_a_users_own_module_hides_a_library(self, learned: str, tmp_path: Path) -> None:
        (tmp_path / "reads_variable.py").write_text("VALUE = 'own'\n")
        with Client(learned) as plain, Client(learned) as caller:
            caller.do(f"sys.path.insert(0, {str(tmp_path)!r})")
            for _ in range(2):
                assert caller.call("tasks_forkserver:attribute", "reads_variable", "VALUE") == ["own", False]
                assert plain.call("tasks_forkserver:attribute", "reads_variable", "VALUE") == ["none", True]

    def test_a_module_hides_a_library_only_if_it_comes_first_in_the_path(
        self, learned: str, tmp_path: Path
    ) -> None:
        """A folder behind the library does not count, but the working directory comes before it."""
        (tmp_path / "reads_variable").mkdir()
        (tmp_path / "reads_variable" / "__init__.py").write_text("VALUE = 'own'\n")
        with Client(learned) as caller:
            caller.do(f"sys.path.append({str(tmp_path)!r})")
            assert caller.call("tasks_forkserver:attribute", "reads_variable", "VALUE") == ["none", True]
            caller.do(f"os.chdir({str(tmp_path)!r}); assert '' in sys.path")
            assert caller.call("tasks_forkserver:attribute", "reads_variable", "VALUE") == ["own", False]

    def test_a_single_file_that_claims_to_be_a_package_is_not_hidden(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``six`` does so. Its file lies in the folder of the search path, so only another file hides it."""
        (tmp_path / "six_alike.py").write_text("__path__ = []\n")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.import_module("six_alike")
        shadows = fitness.Shadows()
        assert shadows.hidden([str(tmp_path)], "/") == []
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "six_alike.py").touch()
        assert shadows.hidden([str(tmp_path / "own"), str(tmp_path)], "/") == ["six_alike"]

    def test_a_compiled_package_is_located(self) -> None:
        """``tomli`` may be compiled: its file is ``__init__`` with a longer ending."""
        package = ModuleType("compiled_alike")
        origin = "/there/compiled_alike/__init__.cpython-311-x86_64-linux-gnu.so"
        package.__spec__ = ModuleSpec("compiled_alike", None, origin=origin)
        with patch.dict(sys.modules, {"compiled_alike": package}):
            assert fitness._homes_of_modules()["compiled_alike"] == "/there"

    def test_a_library_with_another_name_is_not_hidden(self, tmp_path: Path) -> None:
        """PyTorch 2.6 imports setuptools' copy as distutils. No folder of a caller hides it."""
        (tmp_path / "other_alike.py").touch()
        module = ModuleType("other_alike")
        module.__spec__ = ModuleSpec("other_alike", None, origin="/there/setuptools/_other/__init__.py")
        with patch.dict(sys.modules, {"other_alike": module}):
            assert fitness.Shadows().hidden([str(tmp_path)], "/") == []

    def test_a_module_that_the_server_itself_needs_cannot_be_hidden(self, tmp_path: Path) -> None:
        # numpy imports Python's hmac.
        (tmp_path / "hmac.py").write_text("VALUE = 'own'\n")
        task = ("tasks_forkserver:attribute", "hmac", "VALUE")
        with forkservers.own_servers(light=True), Client() as caller:
            caller.do(f"sys.path.insert(0, {str(tmp_path)!r})")
            with pytest.raises(forkservers.CallError, match="needs its own hmac"):
                caller.call(*task)
            assert caller.call(*task, start_method="auto") == ["own", False]
            assert "workers are spawned, which is slower" in caller.errors()

    def test_an_edited_task_is_loaded_again(self, python: str, tmp_path: Path) -> None:
        task = tmp_path / "edited_task.py"
        with Client(python) as caller:
            caller.do(f"sys.path.insert(0, {str(tmp_path)!r}); sys.dont_write_bytecode = True")
            for number in range(4):
                task.write_text(
                    f"def number():\n    return {number}{' ' * number}\n"
                )  # The size changes, too.
                assert caller.call("edited_task:number") == number


# Properties that any process may change of itself.
CHANGES_OF_THE_KERNEL = (
    "os.nice(1)",
    "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
    """
    import ctypes, platform
    library = ctypes.CDLL(None)
    set_io, set_numa = {"x86_64": (251, 238), "aarch64": (30, 237)}[platform.machine()]
    library.syscall(set_io, 1, 0, 3 << 13)  # IOPRIO_CLASS_IDLE
    """,
    "library.syscall(set_numa, 4, None, 0)  # MPOL_LOCAL",
    "library.personality(0x0040000)  # ADDR_NO_RANDOMIZE",
    "library.prctl(29, 12345, 0, 0, 0)  # PR_SET_TIMERSLACK",
    "library.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE",
    "open('/proc/self/oom_score_adj', 'w').write('600')",
    "open('/proc/self/coredump_filter', 'w').write('0x13')",
    "library.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS",
)


class TestInherited:
    def test_a_worker_inherits_the_same_as_a_spawned_worker(self, python: str) -> None:
        with Client(python) as caller:
            seen = [caller.call("tasks_forkserver:inherited")]
            for change in (
                """
                import resource
                sys.path[:0] = ['/nowhere', '']; sys.path.append(os.sep)
                os.chdir('/usr')
                os.umask(0o027)
                os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
                """,
                "resource.setrlimit(resource.RLIMIT_NOFILE, (400, 800))",
                "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
                "resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, 1 << 24))",
                "resource.setrlimit(resource.RLIMIT_AS, (10**9, resource.RLIM_INFINITY))",
                *CHANGES_OF_THE_KERNEL,
            ):
                caller.do(change)
                seen.append(caller.call("tasks_forkserver:inherited"))
                assert seen[-1] != seen[-2]
            same = {
                "blocked",
                "ignored",
                *("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
            }
            for name, value in caller.call("tasks_forkserver:inherited", start_method="spawn").items():
                assert seen[-1][name] == value != seen[0][name] or name in same, name

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root has capabilities to give up")
    def test_a_caller_with_fewer_capabilities_gets_a_worker_with_the_same(self, python: str) -> None:
        with forkservers.own_servers(light=True), Client(python) as usual, Client(python) as hardened:
            server = usual.call("tasks_forkserver:server")
            (name,) = (status.name for status in control.status())
            hardened.do(
                """
                import ctypes
                library = ctypes.CDLL(None)
                library.prctl(24, 21, 0, 0, 0)  # Programs that it starts have no CAP_SYS_ADMIN.
                # It has no capabilities itself.
                library.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
                """
            )
            of_usual, forked, spawned = (
                caller.call("tasks_forkserver:kernel_properties", start_method=method)
                for caller, method in ((usual, "forkserver"), (hardened, "forkserver"), (hardened, "spawn"))
            )
            assert forked == spawned
            assert int(of_usual["CapEff"][0], 16) ^ int(forked["CapEff"][0], 16) == 1 << 21
            assert hardened.call("tasks_forkserver:server") != server
            assert usual.call("tasks_forkserver:server") == server
            # The server of the other caller refuses to fork a worker for it.
            refused = hardened.do(
                f"""
                from flower_gpu.workers import messages
                from flower_gpu.workers.forkserver import client, sockets
                from flower_gpu.workers.call import Call
                client._connected = lambda *_: ({name!r}, sockets.connect({name!r}, 10))
                try:
                    client.find(Call("os:getpid"), None, {{}})
                    answer = "found"
                except Exception as error:
                    answer = str(error)
                """
            )
            assert "no fork server fits this process" in refused

    def test_a_worker_can_start_in_a_removed_directory(self, python: str, tmp_path: Path) -> None:
        (tmp_path / "gone").mkdir()
        with Client(python) as caller:
            caller.do(f"os.chdir({str(tmp_path / 'gone')!r}); os.rmdir(os.getcwd())")
            inherited = caller.call("tasks_forkserver:inherited")
            assert inherited["folder"] == caller.do("answer = os.stat('.').st_ino")

    def test_a_worker_inherits_nothing_from_the_starter_of_its_server(self, python: str) -> None:
        """The limits, signals and umask of the starter apply only to its own workers."""
        with forkservers.own_servers(light=True), Client(python) as starter:
            starter.do(
                """
                    import resource, signal
                    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
                    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1])
                    for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGINT):
                        signal.signal(number, signal.SIG_IGN)
                    os.umask(0o777)
                    os.chdir("/usr")
                    """
            )
            for change in CHANGES_OF_THE_KERNEL:
                if "/proc/self" in change:  # With the other changes, it would get another server.
                    starter.do(change)
            starter.call("tasks_forkserver:server")
            with Client(python) as other:
                forked = other.call("tasks_forkserver:inherited")
                assert forked == other.call("tasks_forkserver:inherited", start_method="spawn")


def test_a_library_that_catches_every_error_cannot_continue_after_it_is_refused(tmp_path: Path) -> None:
    """It starts a thread, catches all errors and saves incomplete data, like matplotlib's list of fonts."""
    (tmp_path / "starts_and_catches.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "try:\n    import is_needed\nexcept Exception:\n    open('kept', 'w').close()\n"
    )
    (tmp_path / "is_needed.py").touch()
    program = """
        from flower_gpu.workers.forkserver import libraries
        try:
            libraries.import_all(["starts_and_catches"])
        except libraries.UnfitLibraryError as error:
            print(error.libraries)
        """
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run_python(textwrap.dedent(program), env=env, cwd=tmp_path, check=True)
    assert done.stdout == "['starts_and_catches']\n"
    assert not (tmp_path / "kept").exists()
