"""The agent of a run on one host of a cluster: a Ray actor with a local host inside.

The driver's :class:`~flower_gpu.simulation.cluster.hosts.RemoteHost` calls the methods of :class:`Agent`
through Ray. Ray runs them in a pool of threads, so several calls may run at the same time, and a later call
may run first. One thread of the driver calls ``exchange`` in a loop. If that gives no answer, the driver
assumes that the agent is dead. So ``exchange`` must never take long:

- Models are fetched by the threads of ``models``, which pass messages on to the local host when their models
  have arrived. If a fetch fails, the next ``exchange`` raises its exception.
- ``exchange`` waits for answers up to a second, and holds ``_exchanging``. The lock is needed because a local
  host allows one exchange at a time, and because ``close`` reads the last news.
- A thread of the agent records samples of the GPUs for the trace.

Events and warnings of the host are files and log lines here. ``exchange`` returns the new ones as
:class:`News`, and the driver writes them into the run's trace and log.

An agent's folder is locked while the agent lives. The next agent on the host removes folders without a lock,
which were left by killed agents.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity

from flower_gpu import files, trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.apps.recording import INTERVAL_S, described_gpus, look_at_gpus
from flower_gpu.calls import environment
from flower_gpu.calls.grants import guard
from flower_gpu.errors import ConfigError
from flower_gpu.gpu import inventory
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.simulation.cluster.models import FetchedModels, PackedMessage
from flower_gpu.simulation.host import HostInfo, HostReport, Work
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.local_host import LocalHost, libraries_in
from flower_gpu.workers.state_folder import made_state_dir

# Attempts at a message when workers die. With other programs on the host, the next attempt may succeed.
_TRIES: Final = 2
# The host accepts no more messages while a message has waited this many seconds for a lease, cores or memory.
_FULL_S: Final = 1.0


@dataclass(frozen=True)
class News:
    """The news of a host since the previous report.

    ``events``: events of its workers and leases, for the trace.
    ``lines``: logged warnings, as level and text.
    """

    events: list[dict[str, Any]]
    lines: list[tuple[int, str]]


class Agent:
    """A local host inside a Ray actor. Ray calls its methods in several threads.

    ``work``: description of the run. The current folder is the app's folder, as sent by Ray.
    """

    def __init__(self, work: Work) -> None:
        import ray

        _be_as_nice_as_parent()
        variables = dict(environment.without_ray(os.environ))
        os.environ.clear()
        os.environ.update(variables)
        self._folder, self._lock = _new_folder()
        os.environ[RUN_DIR_VARIABLE] = str(self._folder)
        self._trace = trace.Follower(RunFolder(self._folder).trace)
        self._lines = _KeptWarnings()
        logging.getLogger("flwr").addHandler(self._lines)
        if isinstance(work.app, AppReference):
            work = replace(work, app=replace(work.app, folder=self._own_copy(Path.cwd())))
        TaskIdentity.run_id, TaskIdentity.node_id = work.nodes.run_id, SUPERLINK_NODE_ID
        TaskIdentity.task_id = 1
        guard.check(os.environ)
        self._models = FetchedModels(ray.get)
        self._fault: BaseException | None = None
        # The variables and cores of this host count, not those of the process that planned the run.
        self._host = LocalHost(replace(work, settings=work.settings.derived()))
        self._host.open(tries=_TRIES)
        self._exchanging = threading.Lock()
        self._ended = threading.Event()
        if self._host.gpus:
            threading.Thread(target=self._look_at_gpus, name="flower-gpu-samples", daemon=True).start()

    def begin(self, packages: Sequence[str]) -> HostInfo:
        """Load the data for calls, and return the description of this host.

        ``packages``: packages that the app imports.

        Raises ConfigError if a package is not installed here or data cannot be loaded.
        """
        missing = [name for name in packages if not is_installed(name)]
        if missing:
            raise ConfigError(f"the app imports {', '.join(missing)}, which is not installed there")
        try:
            self._host.load_data()
        except ConfigError as error:
            # Only the first line, because other hosts may report the same error with its traceback.
            raise ConfigError(str(error).partition("\n")[0]) from error
        return replace(self._host.info, gpus=described_gpus())

    def clock_s(self) -> float:
        """Return the host's time in Unix seconds."""
        return time.time()

    def submit(self, assigned_messages: Sequence[PackedMessage]) -> None:
        """Pass messages on to the local host when their models have arrived. Returns at once.

        Ray may run later calls of this agent before this call.
        """
        self._models.receive(assigned_messages, self._host.submit, self._note_fault)

    def _note_fault(self, error: BaseException) -> None:
        self._fault = error

    def exchange(self, assigned_messages: Sequence[PackedMessage]) -> tuple[HostReport, News]:
        """Take messages, wait briefly for answers to earlier messages, and return them with the news.

        The answer shows the driver that this process is alive, so nothing here may take long.

        Raises the exception of a model that could not be fetched.
        """
        with self._exchanging:
            self.submit(assigned_messages)
            host_report = self._host.exchange([])
            if self._fault is not None:
                raise self._fault
            is_full = self._host.handler.longest_wait_s() > _FULL_S
            if is_full:
                # The next exchange reports the returned messages.
                self._host.return_queued()
            return replace(host_report, is_full=is_full), self._news()

    def _news(self) -> News:
        return News(self._trace.read_new(), self._lines.taken())

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the local host that does not block: to cancel a message, or to ask for a sum."""
        return getattr(self._host, method)(*args)

    def close(self) -> News:
        """End the workers, remove this agent's folder, and return the last news."""
        self._models.close()
        self._host.close()
        self._ended.set()
        if self._host.gpus:
            look_at_gpus(self._folder)
        with self._exchanging:
            news = self._news()
        files.remove(self._folder)
        os.close(self._lock)
        return news

    def _own_copy(self, app: Path) -> Path:
        """Copy the app's folder, make the copy the current folder, and return it.

        Ray may remove its own copy when another agent has ended.
        """
        copy_folder = self._folder / "app"
        shutil.copytree(app, copy_folder, symlinks=True)
        os.chdir(copy_folder)
        return copy_folder

    def _look_at_gpus(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            look_at_gpus(self._folder)
        inventory.close()


def _new_folder() -> tuple[Path, int]:
    """Return a new folder and the descriptor that locks it. Removes the folders of killed agents."""
    agents = made_state_dir() / "agents"
    agents.mkdir(mode=0o700, exist_ok=True)
    files.remove_unlocked_folders(agents.iterdir())
    folder = agents / f"{os.getpid()}-{secrets.token_hex(4)}"
    return folder, files.locked_folder(folder)


def _be_as_nice_as_parent() -> None:
    """Give this process and its workers the priority of Ray itself. Ray raises their niceness by 15.

    Works for root and for processes with the right to raise their priority (RLIMIT_NICE). Otherwise, the
    priority stays.
    """
    with contextlib.suppress(OSError):
        nice = os.getpriority(os.PRIO_PROCESS, os.getppid())
        for task in Path("/proc/self/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


class _KeptWarnings(logging.Handler):
    """A log handler that keeps warnings until :meth:`taken` returns them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line of a record."""
        with contextlib.suppress(Exception):
            self._kept.append((record.levelno, record.getMessage()))

    def taken(self) -> list[tuple[int, str]]:
        """Return the lines since the previous call."""
        taken, self._kept = self._kept, []
        return taken


def packages_of(app: AppReference | ClientApp) -> list[str]:
    """Return the installed packages that an app imports, without importing them."""
    names = dict.fromkeys(library.partition(".")[0] for library in libraries_in(app))
    return [name for name in names if is_installed(name)]


def is_installed(package: str) -> bool:
    """Return True if a package is installed here."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
