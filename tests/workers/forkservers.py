"""Fork servers for tests, processes that make calls through them, and virtual environments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import light_servers
import numpy
import pytest
from processes import is_running, wait_until

import flower_gpu
from flower_gpu import run_in_worker
from flower_gpu.workers import state_folder
from flower_gpu.workers.forkserver import client, control


def marks(timeout_s: float = 180, *, fixture: str | None = None) -> list[pytest.MarkDecorator]:
    """Return pytest marks for a module whose tests need fork servers.

    ``fixture``: name of the fixture that gives the module its own servers.
    """
    needed = pytest.mark.skipif(not client.is_supported(), reason="needs Linux 5.3")
    return [pytest.mark.timeout(timeout_s), needed, *([pytest.mark.usefixtures(fixture)] if fixture else [])]


#: Environment variables with which a process can import the modules of this folder.
WITH_TASKS = {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
}

# Makes the requested calls and prints their results. "do" runs code in the caller itself.
PROGRAM = """
import json, os, sys
from flower_gpu import run_in_worker

if "LIGHT_SERVERS" in os.environ:
    import light_servers
    light_servers.begin()
names = {"os": os, "sys": sys, "run_in_worker": run_in_worker}
for line in sys.stdin:
    request = json.loads(line)
    try:
        if "do" in request:
            exec(request["do"], names)
            answer = {"value": names.pop("answer", None)}
        else:
            answer = {"value": run_in_worker(*request["args"], **request["options"])}
    except BaseException as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), flush=True)
"""


class CallError(Exception):
    """The error of a call in another process."""


class Client:
    """A process that makes calls, one at a time. It leads its own session."""

    def __init__(self, python: str = sys.executable, env: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        environ = {**os.environ, **WITH_TASKS, "FLOWER_GPU_START_METHOD": "forkserver", **(env or {})}
        self._process = subprocess.Popen(
            [python, "-c", PROGRAM],
            env=environ,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, task: str, *args: Any, **options: Any) -> None:
        self._write({"args": [task, *args], "options": options})

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.errors()
        answer = json.loads(line)
        if "error" in answer:
            raise CallError(f"{answer['error']}: {answer['text']}")
        return answer["value"]

    def call(self, task: str, *args: Any, **options: Any) -> Any:
        self.send(task, *args, **options)
        return self.receive()

    def do(self, code: str) -> Any:
        """Run code in the process, and return its variable ``answer``."""
        self.send_code(code)
        return self.receive()

    def send_code(self, code: str) -> None:
        self._write({"do": textwrap.dedent(code)})

    def errors(self) -> str:
        """Return everything that the process wrote to stderr."""
        self._errors.seek(0)
        return self._errors.read()

    def kill(self) -> None:
        """Kill the process and its process group."""
        if self._process.poll() is None:
            os.killpg(self.pid, 9)
        self._process.communicate()

    def close(self) -> None:
        """Close standard input, and wait until the process has ended."""
        self._process.communicate(timeout=150)
        self._errors.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if kind is not None:
            self.kill()
        self.close()

    def _write(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()


@contextmanager
def own_servers(idle_s: float = 60, *, light: bool = False) -> Iterator[Path]:
    """Give this process and its children their own fork servers, and yield the servers' folder.

    ``idle_s``: seconds after which a server without users ends.
    ``light``: use servers without torch.
    """
    folder = Path(tempfile.mkdtemp(prefix="flower-gpu-test-"))
    # Like a user's own folder: only the mode of the servers' folder in it protects the servers.
    folder.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        if light:
            patch.setenv("LIGHT_SERVERS", "1")
        patch.setattr(client, "_memory", light_servers.Memory() if light else client._Memory())
        patch.setenv("FLOWER_GPU_STATE_DIR", str(folder))
        patch.setenv("FLOWER_GPU_SERVER_IDLE_S", str(idle_s))
        try:
            yield state_folder.state_dir()
        finally:
            pids = control.stop(wait_s=20)
            release_servers()
            shutil.rmtree(folder, ignore_errors=True)
    assert not [pid for pid in pids if is_running(pid)]


def compile_library(path: Path, source: str, *options: str) -> None:
    """Compile C code into a shared library. Without a compiler, skip the test."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    command = ["cc", "-shared", "-fPIC", "-pthread", "-x", "c", "-", *options, "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True, timeout=150)


# A library that starts its own threads, and threads of OpenMP.
THREADS = """
#include <pthread.h>
#include <unistd.h>

static void *wait_for_ever(void *unused) { for (;;) pause(); return unused; }

void start_thread(void) { pthread_t thread; pthread_create(&thread, 0, wait_for_ever, 0); }

int sum_in_two_threads(void)
{
    int sum = 0;
#pragma omp parallel for num_threads(2) reduction(+ : sum)
    for (int number = 0; number < 10; number++)
        sum += number;
    return sum;
}
"""


def release_servers() -> None:
    """Close this process's connections to fork servers, so that they may end."""
    client._memory.stays.close()


def call_server() -> int:
    """Make a call in this process, and return the pid of its fork server."""
    server = run_in_worker("tasks_forkserver:server", start_method="forkserver")
    assert isinstance(server, int)
    return server


def only_server() -> control.Status:
    """Wait until a single server is left, and return its status."""
    assert wait_until(lambda: len(control.status()) == 1), control.status()
    return control.status()[0]


def until_only(condition: Any) -> control.Status:
    """Wait until a single server is left and fulfils a condition, and return its status."""

    statuses: list[control.Status] = []

    def is_fulfilled() -> bool:
        statuses[:] = control.status()
        return len(statuses) == 1 and bool(condition(statuses[0]))

    # On a busy machine, importing libraries takes long.
    assert wait_until(is_fulfilled, timeout_s=150), statuses
    return statuses[0]


def make_environment(folder: Path, packages: Mapping[str, str]) -> str:
    """Make a virtual environment for workers with some more packages, and return its interpreter.

    It has no torch, because each of its many fork servers would take seconds to import torch.
    """
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True, timeout=150
    )
    site = site_packages(folder)
    (site / "flower_gpu.pth").write_text(f"{Path(flower_gpu.__file__).parents[1]}\n")
    for package in (cloudpickle, numpy):
        source = Path(package.__file__).parent
        for linked in (source, source.with_name(f"{source.name}.libs")):
            if linked.exists():
                (site / linked.name).symlink_to(linked)
    for name, text in packages.items():
        install(site, name, text)
    return str(folder / "bin" / "python")


def site_packages(folder: Path) -> Path:
    """Return the folder with the packages of a virtual environment."""
    return next((folder / "lib").glob("python*")) / "site-packages"


def install(site: Path, name: str, text: str) -> None:
    """Install a package as pip does: the package, and a folder with its metadata."""
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(textwrap.dedent(text))
    (site / f"{name}-1.0.dist-info").mkdir()
    (site / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
