"""The agent of a run on one host of a cluster: it does there what one machine does for a run."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import platform
import secrets
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity

from flower_gpu import files, trace
from flower_gpu.apps.app_imports import libraries_of, libraries_used
from flower_gpu.apps.folder import RunFolder
from flower_gpu.apps.recording import INTERVAL_S, look_at_gpus, told_gpus
from flower_gpu.calls import environment
from flower_gpu.errors import ConfigError
from flower_gpu.flower import record_bytes
from flower_gpu.gpu import guard, inventory
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.simulation import machine
from flower_gpu.simulation.cluster.visits import FetchedModels, HostSums, SummedPart, Visit, Visited
from flower_gpu.simulation.cluster.work_queue import WorkQueue
from flower_gpu.simulation.grid import reply_of
from flower_gpu.simulation.host import Host, Work
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.states import StateStore
from flower_gpu.workers.state_folder import made_state_dir
from flower_gpu.workers.threads import cores

_TRIES: Final = 2  # of a message whose worker dies: on another day, or with other neighbours, it may not
_IDLE_S: Final = 0.2  # without a message, until a worker gives back a lease that others may need
_FETCH_S: Final = 1.0  # that whoever fetches waits, at most
_FULL_S: Final = 1.0  # that a message waits for a lease, cores or memory, until the host takes no more


@dataclass(frozen=True)
class About:
    """A host, as its agent found it.

    ``name``: the host's.
    ``pid``: the agent's.
    ``concurrency``: how many messages it handles at a time, at most.
    ``threads``: of each worker's libraries.
    ``described``: processors, GPUs and versions, as the settings of a run have them.
    ``cores``: how many it has.
    ``gpus``: its GPUs, as the trace has them.
    """

    name: str
    pid: int
    concurrency: int
    threads: int
    described: dict[str, Any]
    cores: int
    gpus: list[dict[str, Any]]


@dataclass(frozen=True)
class News:
    """What has happened on a host since the last time.

    ``events``: of its workers and leases, for the trace.
    ``lines``: level and text of what was logged.
    ``is_full``: whether it can take no more messages: one waits already.
    """

    events: list[dict[str, Any]]
    lines: list[tuple[int, str]]
    is_full: bool


class _Nodes(VirtualNodes):
    """Virtual nodes whose states came with their messages and go back with the replies."""

    def __init__(self, count: int, seed: int, run_id: int, run_config: Mapping[str, Any]) -> None:
        super().__init__(count, seed, run_id, run_config, StateStore())
        self._here = threading.local()

    def begin(self, state: bytes) -> None:
        """Let the node that this thread handles a message of have a state."""
        self._here.state = state

    def end(self) -> bytes:
        """Return what it keeps."""
        state: bytes = self._here.state
        return state

    def context_of(self, node_id: int) -> Context:
        """Return a node's context."""
        context = super().context_of(node_id)
        state: bytes = self._here.state
        context.state = record_bytes.decode(state) if state else RecordDict()
        return context

    def keep(self, context: Context) -> None:
        """Keep what a message has left in a context's state."""
        self._here.state = record_bytes.encode(context.state) if context.state else b""


class Agent:
    """Handles messages on its host. Ray calls its methods in several threads.

    ``work``: the run's. An app with a folder is in the current one, where Ray has put it.
    ``run_id``: the run's.
    ``run_config``: what contexts have as ``run_config``.
    """

    def __init__(self, work: Work, run_id: int, run_config: Mapping[str, Any]) -> None:
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
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SUPERLINK_NODE_ID, 1
        guard.check(os.environ)
        self._host = Host(work)
        self._models = FetchedModels(ray.get)
        self._sums = HostSums()
        self._nodes = _Nodes(work.num_supernodes, work.seed, run_id, run_config)
        self._under_way: dict[str, Message] = {}
        self._here = threading.local()
        self._handler = self._host.open(self._nodes, lambda message: int(self._here.seed), tries=_TRIES)
        self._host.durations.on_learned = self._learned
        self._queue = WorkQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"flower-gpu-agent-{number}", daemon=True)
            for number in range(self._host.concurrency + self._host.has_spare)
        ]
        for thread in self._threads:
            thread.start()
        self._ended = threading.Event()
        if self._host.gpus:
            threading.Thread(target=self._look_at_gpus, name="flower-gpu-samples", daemon=True).start()

    def begin(self, packages: Sequence[str]) -> About:
        """Load what calls find loaded, and tell of this host.

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
        return About(
            platform.node(),
            os.getpid(),
            self._host.concurrency,
            self._host.threads,
            machine.described(self._host.gpus),
            cores(),
            told_gpus(),
        )

    def clock_s(self) -> float:
        """Return what the host's clock says: Unix seconds."""
        return time.time()

    def give(self, visits: Sequence[Visit]) -> None:
        """Have messages handled, in this order. Ray may carry what is called after this before it."""
        self._queue.give(visits)

    def exchange(self, visits: Sequence[Visit]) -> list[Visited]:
        """Have messages handled, and return what has become of others: errors are in the replies.

        Waits for that, not for long.
        """
        self._queue.give(visits)
        return self._queue.fetch(_FETCH_S)

    def settle(self, group: int) -> None:
        """Sum the replies of a group, all of which are there."""
        self._sums.settle(group)

    def take(self, group: int) -> SummedPart | None:
        """Return the sums of a group so far; None where there is nothing."""
        return self._sums.take(group)

    def forget(self, groups: Sequence[int]) -> None:
        """Give up groups."""
        self._sums.forget(groups)

    def cancel(self, message_id: str) -> None:
        """Give up a message."""
        self._queue.cancel(message_id)
        if (message := self._under_way.get(message_id)) is not None:
            self._handler.cancel(message)

    def news(self) -> News:
        """Return what has happened since the last time."""
        events = self._trace.read_new()
        is_full = self._handler.longest_wait_s() > _FULL_S
        if is_full:
            self._queue.give_back()
        return News(events, self._lines.taken(), is_full)

    def facts(self) -> dict[str, Any]:
        """Return what the result is to hold of this host."""
        return self._handler.facts()

    def close(self) -> News:
        """End the workers; returns the last news."""
        self._queue.close()
        for message in list(self._under_way.values()):
            self._handler.cancel(message)
        self._host.end_workers()
        for thread in self._threads:
            thread.join()
        self._ended.set()
        if self._host.gpus:
            look_at_gpus(self._folder)
        self._host.close()
        events = self._trace.read_new()
        files.remove(self._folder)
        os.close(self._lock)
        return News(events, self._lines.taken(), False)

    def _own_copy(self, app: Path) -> Path:
        """Copy an app's folder and go there: Ray may remove its own copy when another agent has ended."""
        copied = self._folder / "app"
        shutil.copytree(app, copied, symlinks=True)
        os.chdir(copied)
        return copied

    def _work(self) -> None:
        has_done = False
        while not self._queue.is_closed:
            visit = self._queue.next(_IDLE_S if has_done else None)
            if visit is None:
                self._handler.idle()
            else:
                try:
                    self._queue.finish(self._handle(visit))
                except BaseException as error:  # a fault of ours, or a model that cannot be fetched
                    self._queue.fail(error)
            has_done = visit is not None
            del visit
        self._handler.leave()

    def _handle(self, visit: Visit) -> Visited:
        message = self._models.message(visit)
        message_id = message.metadata.message_id
        self._here.seed, self._here.call_s = visit.seed, None
        self._nodes.begin(visit.state)
        self._under_way[message_id] = message
        began = time.monotonic()
        try:
            if self._queue.is_cancelled(visit):
                return Visited.unhandled(visit)
            reply = reply_of(self._handler, message)
        finally:
            del self._under_way[message_id]
        seconds = time.monotonic() - began
        state, call_s = self._nodes.end(), self._here.call_s
        if visit.group is None:
            return Visited(message_id, reply, state, seconds, call_s)
        self._sums.add(visit.group, self._nodes.place_of(message.metadata.dst_node_id), reply, state)
        return Visited(message_id, seconds=seconds, call_s=call_s)

    def _learned(self, kind: str, client: int, seconds: float) -> None:
        self._here.call_s = seconds

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
    if isinstance(app, AppReference):
        modules = libraries_of(app.folder, app.name.partition(":")[0])
    else:
        modules = libraries_used(vars(app))
    return [name for name in dict.fromkeys(each.partition(".")[0] for each in modules) if is_there(name)]


def is_there(package: str) -> bool:
    """Tell whether a package is installed here."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
