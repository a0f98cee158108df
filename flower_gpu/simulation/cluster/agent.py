"""The agent of a run on one host of a cluster: the host as it is on one machine, in an actor of Ray."""

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
from flower_gpu.apps.recording import INTERVAL_S, look_at_gpus, told_gpus
from flower_gpu.calls import environment
from flower_gpu.errors import ConfigError
from flower_gpu.gpu import guard, inventory
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.simulation.cluster.models import FetchedModels, PackedVisit
from flower_gpu.simulation.host import About, Answers, Work
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.local_host import LocalHost, libraries_in
from flower_gpu.workers.state_folder import made_state_dir

_TRIES: Final = 2  # of a message whose worker dies: on another day, or with other neighbours, it may not
_FULL_S: Final = 1.0  # that a message waits for a lease, cores or memory, until the host takes no more


@dataclass(frozen=True)
class News:
    """What has happened on a host since the last time.

    ``events``: of its workers and leases, for the trace.
    ``lines``: level and text of what was logged.
    """

    events: list[dict[str, Any]]
    lines: list[tuple[int, str]]


class Agent:
    """The host of a run inside an actor. Ray calls its methods in several threads.

    ``work``: the run's. An app with a folder is in the current one, where Ray has put it.
    """

    def __init__(self, work: Work) -> None:
        import ray

        _be_as_nice_as_parent()
        found = dict(environment.without_ray(os.environ))
        os.environ.clear()
        os.environ.update(found)
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
        self._host = LocalHost(work)
        self._host.open(tries=_TRIES)
        self._exchanging = threading.Lock()
        self._ended = threading.Event()
        if self._host.gpus:
            threading.Thread(target=self._look_at_gpus, name="flower-gpu-samples", daemon=True).start()

    def begin(self, packages: Sequence[str]) -> About:
        """Load the data for calls, and describe this host.

        ``packages``: what the app imports.
        Raises ConfigError if one of the packages is missing here, or data cannot be loaded.
        """
        missing = [name for name in packages if not is_there(name)]
        if missing:
            raise ConfigError(f"the app imports {', '.join(missing)}, which is not installed there")
        try:
            self._host.load_data()
        except ConfigError as error:  # without the lines of a traceback: hosts may have the same to say
            raise ConfigError(str(error).partition("\n")[0]) from error
        return replace(self._host.about, gpus=told_gpus())

    def clock_s(self) -> float:
        """Return the host's time in Unix seconds."""
        return time.time()

    def take(self, visits: Sequence[PackedVisit]) -> None:
        """Have messages handled, once their models are here. Returns at once.

        Ray may carry out calls that come after this one before it.
        """
        self._models.receive(visits, self._host.take, self._note_fault)

    def _note_fault(self, error: BaseException) -> None:
        self._fault = error

    def exchange(self, visits: Sequence[PackedVisit]) -> tuple[Answers, News]:
        """Have messages handled; wait briefly for answers to others, and return them with the news.

        The driver knows by the answer that this process is alive, so nothing here may take long. Raises the
        exception by which a model could not be fetched.
        """
        with self._exchanging:
            self.take(visits)
            answers = self._host.exchange([])
            if self._fault is not None:
                raise self._fault
            is_full = self._host.handler.longest_wait_s() > _FULL_S
            if is_full:
                self._host.give_back()  # which is told the next time
            return replace(answers, is_full=is_full), self._news()

    def _news(self) -> News:
        return News(self._trace.read_new(), self._lines.taken())

    def ask_for_sum(self, group: int) -> None:
        """Have the sum of a group come with the next answers."""
        self._host.ask_for_sum(group)

    def forget(self, groups: Sequence[int]) -> None:
        """Give up groups whose sums nobody wants."""
        self._host.forget(groups)

    def cancel(self, message_id: str) -> None:
        """Give up a message, also one that comes later."""
        self._host.cancel(message_id)

    def facts(self) -> dict[str, Any]:
        """Return this host's facts for the result."""
        return self._host.facts()

    def close(self) -> News:
        """End the workers; returns the last news."""
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
        """Copy an app's folder and go there: Ray may remove its own copy when another agent has ended."""
        copied = self._folder / "app"
        shutil.copytree(app, copied, symlinks=True)
        os.chdir(copied)
        return copied

    def _look_at_gpus(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            look_at_gpus(self._folder)
        inventory.close()


def _new_folder() -> tuple[Path, int]:
    """Return a folder of this process, and the descriptor that locks it; remove those of killed agents."""
    agents = made_state_dir() / "agents"
    agents.mkdir(mode=0o700, exist_ok=True)
    files.remove_unlocked_folders(agents.iterdir())
    folder = agents / f"{os.getpid()}-{secrets.token_hex(4)}"
    return folder, files.locked_folder(folder)


def _be_as_nice_as_parent() -> None:
    """Give this process, and so its workers, the priority that Ray was started with. Ray lowers it by 15.

    Root may do that, and who has the right to (RLIMIT_NICE).
    """
    with contextlib.suppress(OSError):
        nice = os.getpriority(os.PRIO_PROCESS, os.getppid())
        for task in Path("/proc/self/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


class _KeptWarnings(logging.Handler):
    """Keeps warnings until somebody takes them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        with contextlib.suppress(Exception):
            self._kept.append((record.levelno, record.getMessage()))

    def taken(self) -> list[tuple[int, str]]:
        """Return the lines since the last time."""
        taken, self._kept = self._kept, []
        return taken


def packages_of(app: AppReference | ClientApp) -> list[str]:
    """Return the packages that an app imports and that are installed here; nothing is imported."""
    names = dict.fromkeys(each.partition(".")[0] for each in libraries_in(app))
    return [name for name in names if is_there(name)]


def is_there(package: str) -> bool:
    """Tell whether a package is installed here."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
