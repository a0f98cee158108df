"""uv installs the packages that an app declares, from wheels in a folder. The SuperNodes are real."""

from __future__ import annotations

import functools
import http.server
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import run_programs
from live_processes import is_running
from supernode_host import COMMAND, Federation, Process
from waiting import until

from flower_gpu import files
from flower_gpu.errors import ConfigError
from flower_gpu.programs import environments

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="the fork server needs Linux"),
]

APP = Path(__file__).parent / "declaring_app"
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"


def wheel(folder: Path, name: str, number: str, code: str = "") -> None:
    """Create a wheel of a package with this code."""
    info = f"{name}-{number}.dist-info"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = folder / f"{name}-{number}-py3-none-any.whl"
    with files.replaced(path) as new, zipfile.ZipFile(new, "w") as archive:
        archive.writestr(f"{name}/__init__.py", code)
        archive.writestr(f"{info}/METADATA", METADATA.format(name=name, number=number))
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")


def source(folder: Path, name: str, number: str, code: str) -> None:
    """Create a source distribution of a package. Its build runs this code."""
    texts = {"PKG-INFO": METADATA.format(name=name, number=number), "setup.py": code}
    with tarfile.open(folder / f"{name}-{number}.tar.gz", "w:gz") as archive:
        for path, text in texts.items():
            info = tarfile.TarInfo(f"{name}-{number}/{path}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))


class Host(Federation):
    """A host on which uv finds packages only in a folder."""

    def with_packages(self, name: str) -> Path:
        """Let uv find packages in a new folder, and keep the environments next to it. Returns the folder."""
        parent = self.folder / "host" / name
        self.environments, self.replies = parent / "envs", parent / "replies"
        wheels = parent / "wheels"
        wheels.mkdir(parents=True)
        wheel(wheels, "flwr", version("flwr"))
        self.env |= {
            "UV_FIND_LINKS": str(wheels),
            "UV_OFFLINE": "1",
            "UV_CACHE_DIR": str(parent / "uv"),
            "FLOWER_GPU_ENVIRONMENTS_DIR": str(self.environments),
        }
        return wheels

    def connected(self, count: int, *options: str) -> Process:
        """Start SuperNodes that may install packages, and wait until they are connected."""
        nodes = self.supernodes(count, *options, flower=(environments.OPTION,))
        until(lambda: f"connected: {count} of {count}" in nodes.output, "the SuperNodes are connected")
        return nodes

    def answers(self, messages: int, nodes: int) -> list[dict[str, Any]]:
        """Run the app and return the replies to its messages. Each of the ``nodes`` SuperNodes gets all."""
        self.replies.unlink(missing_ok=True)
        run = self.run(APP, num_messages=messages, replies_file=str(self.replies))

        def lines() -> list[str]:
            return self.replies.read_text().splitlines() if self.replies.exists() else []

        until(lambda: len(lines()) == messages * nodes or not run.runs, "all replies have arrived", 250)
        assert len(lines()) == messages * nodes, run.output
        return [json.loads(line) for line in lines()]

    def environment_names(self) -> list[str]:
        """Return the names of all environments, also of incomplete ones."""
        return [path.name for path in self.environments.iterdir() if path.is_dir()]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with Host(tmp_path_factory.mktemp("host")) as host:
        yield host


@pytest.mark.e2e
def test_supernodes_and_launch_share_one_environment(host: Host) -> None:
    """At first the package does not exist. The full error is reported for only one message."""
    wheels = host.with_packages("open")
    with host.one_test():
        host.connected(2)
        errors = [reply["error"] for reply in host.answers(2, 2)]
        full_errors = [error for error in errors if "uv's last lines" in error]
        assert len(full_errors) == 1 and "tinything was not found" in full_errors[0], errors
        assert sum("as an earlier message of this run said" in error for error in errors) == 3, errors
        assert host.environment_names() == []

        wheel(wheels, "tinything", "1.0", "VALUE = 41\n")
        replies = host.answers(3, 2)
        assert [reply["value"] for reply in replies] == [41] * 6
        assert sorted(reply["messages"] for reply in replies) == [1, 1, 2, 2, 3, 3]
        [name] = host.environment_names()
        assert {Path(reply["file"]).is_relative_to(host.environments / name) for reply in replies} == {True}
        # The later workers are forks of one server of this environment, which has imported the app.
        assert len({reply["parent"] for reply in replies[2:]}) == 1
        logs = "".join(log.read_text() for log in host.runs.glob("*/supernode-*.log"))
        assert logs.count("installed in ") == 1

    wheel(wheels, "tinything", "2.0", "VALUE = 42\n")
    host.replies.unlink()
    config = f"num-messages=1 on-server=true replies-file={json.dumps(str(host.replies))}"
    command = (*COMMAND, "launch", str(APP), "--clients", "1", "--run-config", config)
    launch = host.start("launch", *command, env={"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "0"})
    assert launch.wait(250) == 0, launch.output
    replies = [json.loads(line) for line in host.replies.read_text().splitlines()]
    # An existing environment is not updated to a newer version of a package.
    assert [reply["value"] for reply in replies] == [41]
    assert host.environment_names() == [name]


@pytest.mark.e2e
def test_a_confined_app_gets_only_wheels_and_imports_them_under_confinement(host: Host) -> None:
    wheels = host.with_packages("confined")
    mark = host.folder / "host" / "was-run"
    run = f"open({str(mark)!r}, 'w')\n"
    source(wheels, "tinything", "1.0", run)
    with host.one_test():
        host.connected(1, "--confine")
        [reply] = host.answers(1, 1)
        assert "uv's last lines" in reply["error"] and "tinything" in reply["error"]

        code = f"try:\n    {run}except PermissionError as error:\n    VALUE = str(error)\n"
        wheel(wheels, "tinything", "1.1", code)
        [first, second] = host.answers(2, 1)
        assert first["value"] == second["value"] == f"[Errno 13] Permission denied: {str(mark)!r}"
        assert not mark.exists()


PREPARE = """
import logging, sys
from pathlib import Path
from flower_gpu.programs import environments
logging.basicConfig(level=logging.INFO, format="%(message)s")
try:
    environments._prepare(Path(sys.argv[1]), int(sys.argv[2]), is_confined=False)
except environments.ConfigError as error:
    sys.exit(str(error))
print(environments.used())
"""
# A build backend without dependencies, for a package with one module.
BACKEND = r"""
import zipfile

def build_wheel(folder, settings=None, metadata=None):
    name = "tinything-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.write("tinything.py")
        info = "tinything-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
PROJECT = """
[project]
name = "tinything"
version = "1.0"
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


class Declaring:
    """An app that declares packages, on a host without an index."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.app, self.package = folder, folder / "app", folder / "package"
        self.app.mkdir()
        self.package.mkdir()
        (self.package / "backend.py").write_text(BACKEND)
        (self.package / "pyproject.toml").write_text(PROJECT)
        wheel(folder, "flwr", version("flwr"))

    def declare(self, needed: str, source: str = "") -> None:
        """Declare one package. ``source`` is the TOML value that says where uv finds it."""
        settings = f"no-index = true\nfind-links = [{json.dumps(str(self.folder))}]\n"
        sources = f"[tool.uv.sources]\ntinything = {source}\n" if source else ""
        text = f"[project]\ndependencies = [{json.dumps(needed)}]\n[tool.uv]\n{settings}{sources}"
        (self.app / "pyproject.toml").write_text(text)

    def prepare(self, run: int) -> run_programs.Ended:
        env = {
            **os.environ,
            "UV_CACHE_DIR": str(self.folder / "uv"),
            "FLOWER_GPU_ENVIRONMENTS_DIR": str(self.folder / "envs"),
        }
        return run_programs.run([sys.executable, "-P", "-c", PREPARE, self.app, run], env=env)

    def value(self, run: int) -> str:
        """Return the source of the module that is installed for a run."""
        completed = self.prepare(run)
        assert completed.returncode == 0, completed.stderr
        [module] = Path(completed.stdout.strip()).glob("lib/python*/site-packages/tinything.py")
        return module.read_text()

    def environments(self) -> int:
        """Return the number of environments."""
        return sum(path.is_dir() for path in (self.folder / "envs").iterdir())

    def git(self, *arguments: str) -> None:
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        run_programs.run(["git", *identity, *arguments], cwd=self.package, check=True)


@pytest.fixture
def declaring(tmp_path: Path) -> Declaring:
    return Declaring(tmp_path)


@pytest.mark.parametrize("is_url", [False, True])
def test_a_package_from_a_folder_is_installed_with_its_present_content(
    declaring: Declaring, is_url: bool
) -> None:
    if is_url:
        declaring.declare(f"tinything @ {declaring.package.as_uri()}")
    else:
        declaring.declare("tinything", "{path = '../package'}")
    for run, number in enumerate((1, 2, 1)):
        (declaring.package / "tinything.py").write_text(f"VALUE = {number}\n")
        assert declaring.value(run) == f"VALUE = {number}\n"
    assert declaring.environments() == 2


def test_files_written_to_the_folder_of_a_package_cause_no_new_installation(declaring: Declaring) -> None:
    """Logs are ignored. After other changes, a run still keeps the environment of its first message."""
    declaring.declare("tinything", "{path = '../package'}")
    (declaring.package / "tinything.py").write_text("VALUE = 1\n")
    for run in (1, 1, 2):
        assert declaring.value(run) == "VALUE = 1\n"
        with (declaring.package / "training.log").open("a") as log:
            log.write("epoch 1\n")
    assert declaring.environments() == 1
    (declaring.package / "metrics.csv").write_text("loss\n")
    (declaring.package / "tinything.py").write_text("VALUE = 2\n")
    assert declaring.value(run=2) == "VALUE = 1\n"
    assert declaring.environments() == 1
    assert [declaring.value(run) for run in (3, 2, 1)] == [f"VALUE = {number}\n" for number in (2, 1, 1)]


@pytest.mark.parametrize("is_url", [False, True])
def test_a_run_keeps_the_commit_that_the_branch_had_at_its_first_message(
    declaring: Declaring, is_url: bool
) -> None:
    """A push affects only later runs. If the repository is gone, the last known commit is used."""
    url = declaring.package.as_uri()
    if is_url:
        declaring.declare(f"tinything @ git+{url}@some/branch")
    else:
        declaring.declare("tinything", f"{{git = '{url}', branch = 'some/branch'}}")
    declaring.git("init", "--initial-branch=some/branch")

    def push(number: int) -> None:
        (declaring.package / "tinything.py").write_text(f"VALUE = {number}\n")
        declaring.git("add", ".")
        declaring.git("commit", "-m", "a change")

    push(1)
    assert declaring.value(run=5) == "VALUE = 1\n"
    push(2)
    assert [declaring.value(run) for run in (5, 6, 5)] == [f"VALUE = {number}\n" for number in (1, 2, 1)]
    declaring.package.rename(declaring.folder / "gone")
    assert declaring.value(run=7) == "VALUE = 2\n"


def test_credentials_in_urls_appear_in_no_log_and_no_error(declaring: Declaring) -> None:
    """The test checks the log of a successful installation and the error for a missing package."""
    secrets = ("pa55word", "t0ken")
    wheel(declaring.folder, "tinything", "1.0", "VALUE = 41\n")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(declaring.folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        results = []
        for name in ("tinything-1.0-py3-none-any.whl", "missing-1.0-py3-none-any.whl"):
            package = name.partition("-")[0]
            declaring.declare(f"{package} @ http://me:{secrets[0]}@{host}/{name}?key={secrets[1]}")
            results.append(declaring.prepare(run=1))
        server.shutdown()
    installed, missing = results
    assert installed.returncode == 0, installed.stderr
    assert "installing the packages that the app declares: tinything\n" in installed.stderr
    assert missing.returncode == 1 and f"http://{host}/..." in missing.stderr, missing.stderr
    failures = [path.read_text() for path in (declaring.folder / "envs").glob("*.failed")]
    assert len(failures) == 1
    texts = (installed.stderr, missing.stderr, *failures)
    assert not any(secret in text for secret in secrets for text in texts)


def test_an_installation_that_was_killed_is_repeated_by_the_next_process(tmp_path: Path) -> None:
    """Two processes start at the same time after the kill, and only one of them installs."""
    wheels, envs, app = tmp_path / "wheels", tmp_path / "envs", tmp_path / "app"
    wheels.mkdir()
    app.mkdir()
    wheel(wheels, "flwr", version("flwr"))
    wheel(wheels, "tinything", "1.0")
    requested, may_answer = threading.Event(), threading.Event()

    class Slow(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.set()
            may_answer.wait()
            super().do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Slow, directory=str(wheels))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uv = f'[tool.uv]\nno-index = true\nfind-links = ["http://127.0.0.1:{server.server_port}/"]\n'
        (app / "pyproject.toml").write_text((APP / "pyproject.toml").read_text() + uv)
        env = {
            **os.environ,
            "UV_CACHE_DIR": str(tmp_path / "uv"),
            "FLOWER_GPU_ENVIRONMENTS_DIR": str(envs),
        }
        command = [sys.executable, "-P", "-c", PREPARE, str(app), "1"]

        def start() -> subprocess.Popen[str]:
            return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

        with start() as killed:
            assert requested.wait(200)
            [pid] = uv_processes(envs)
            killed.send_signal(signal.SIGKILL)
        until(lambda: not is_running(pid), "uv has ended")
        may_answer.set()
        with start() as first, start() as second:
            outputs = [process.communicate(timeout=200)[0].strip() for process in (first, second)]
        server.shutdown()
    [name] = [path.name for path in envs.iterdir() if path.is_dir()]
    assert outputs == [str(envs / name)] * 2


def uv_processes(folder: Path) -> list[int]:
    """Return the pids of uv processes that work in a folder."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "exe").readlink().name == "uv" and (path / "cwd").readlink().is_relative_to(folder):
                pids.append(int(path.name))
    return pids


def test_environments_unused_for_a_week_are_removed_unless_they_are_locked(tmp_path: Path) -> None:
    old, used = tmp_path / ("0" * 20), tmp_path / ("1" * 20)
    for path in (old, used, tmp_path / "another"):
        (path / "lib").mkdir(parents=True)
    lock = environments._locked_for_use(used)
    assert lock is not None
    week_ago_s = time.time() - environments._KEPT_S - 1
    for path in tmp_path.iterdir():
        os.utime(path, (week_ago_s, week_ago_s))
    environments._remove_unused(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [used.name, "another"]
    lock.close()


def test_a_folder_that_other_accounts_can_write_to_is_refused_at_the_start(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    env = {**os.environ, "FLOWER_GPU_ENVIRONMENTS_DIR": str(tmp_path)}
    completed = run_programs.run([*COMMAND, "supernode", "--", "--insecure", environments.OPTION], env=env)
    assert completed.returncode != 0
    assert "Set FLOWER_GPU_ENVIRONMENTS_DIR to another folder" in completed.stderr


@pytest.mark.parametrize(
    "needed", ["tinything @ https://example.org/tinything-1.0.tar.gz", "tinything @ file:///x"]
)
def test_a_confined_app_cannot_choose_the_source_of_a_package(tmp_path: Path, needed: str) -> None:
    text = f'[project]\ndependencies = ["{needed}"]\n[tool.uv]\ncache-dir = "/etc"\n'
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError, match="is not a package of an index"):
        environments._declared(tmp_path, is_confined=True)
    (tmp_path / "pyproject.toml").write_text(re.sub(' @ [^"]*', "", text))
    confined, unconfined = (environments._declared(tmp_path, is_confined=value) for value in (True, False))
    assert confined["project"] == unconfined["project"]
    assert "cache-dir" in unconfined["tool"]["uv"] and "cache-dir" not in confined["tool"]["uv"]
