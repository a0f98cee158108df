"""The hosts of a Ray cluster, as the driver knows them: agents are started, asked for news, and lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, Final

from flwr.common.logger import log

from flower_gpu import trace
from flower_gpu.errors import ConfigError, FlowerGPUError, shortened
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.simulation import determinism
from flower_gpu.simulation.cluster.agent import Agent, News, packages_of
from flower_gpu.simulation.cluster.models import PackedVisit, SentModels
from flower_gpu.simulation.host import About, Answers, Host, Visit, Work
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.trace import Event
from flower_gpu.workers.own_process import restored_environment

#: Versions that must be the same on all hosts.
_SAME: Final = ("flower-gpu", "flwr", "torch")
#: What of an app's folder no host needs.
_NOT_SENT: Final = ["runs", ".git", ".venv", "__pycache__", "*.pyc"]
_OVERRIDES: Final = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
_LOOK_S: Final = 0.5  # that one waits for an answer, before it is looked whether somebody still wants it
_JOIN_S: Final = 2.0  # between two looks whether a host has joined
_ANSWER_S: Final = 10.0  # that an agent has for its last words
# After so many looks for its answer an agent is taken for dead: it is stopped, or its disk hangs. Whatever
# takes long on a living host, such as fetching a model, delays no answer. Seconds are not counted: in those
# this process may have been stopped itself.
_SILENT: Final = 120
_CALLS: Final = 8  # of an agent's methods at a time: one waits for messages, and few others are made
_SKEW_S: Final = 0.05  # by which clocks may differ before times in the trace are corrected


class HostLostError(FlowerGPUError):
    """A host, or its agent, is gone."""


@contextmanager
def connected(address: str, app: object) -> Iterator[None]:
    """Be a driver of a Ray cluster, in the block.

    ``address``: as ``ray.init`` takes it: ``"auto"``, ``"host:port"``, ``"ray://host:port"``.
    ``app``: its folder is sent to all hosts.
    Raises ConfigError if Ray is not installed, or there is no such cluster.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "--ray-address needs Ray, which is not installed: pip install 'flower-gpu[cluster]'"
        ) from None
    environment: dict[str, Any] = {}
    if isinstance(app, AppReference):
        environment = {"working_dir": str(app.folder), "excludes": _NOT_SENT}
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _check_is_there(address)
        with restored_environment([_OVERRIDES]):
            os.environ[_OVERRIDES] = "0"  # agents see to it themselves; without it Ray warns of its default
            ray.init(address, runtime_env=environment, log_to_driver=False, configure_logging=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--ray-address {address}: there is no Ray cluster that can be reached "
            f"({_first_line(error)}). Start one with `ray start --head`"
        ) from error
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():  # Ray's own would end the run without its summary
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


class RemoteHost(Host):
    """A host of the cluster, and its agent.

    ``about``: what the agent has said at its start.
    ``node``: Ray's id of the machine.
    ``ahead_s``: by which its clock is ahead of this one's.
    ``models``: what was sent to hosts.
    ``tell``: gets events for the trace.
    """

    def __init__(
        self,
        about: About,
        node: str,
        agent: Any,
        clock_ahead_s: float,
        models: SentModels,
        tell: Callable[[Iterable[Event]], None],
    ) -> None:
        super().__init__(about)
        self.node = node
        self.agent = agent
        self._clock_ahead_s = clock_ahead_s
        self._models = models
        self._tell = tell
        self._taking: deque[Any] = deque()  # calls that nobody has waited for

    def take(self, visits: Sequence[Visit]) -> None:
        """Have messages handled. That there is no agent any more is told by :meth:`exchange`."""
        with suppress(ConnectionError):  # of a driver that is not on the cluster itself
            self._taking.append(self.agent.take.remote(self._packed(visits)))

    def exchange(self, visits: Sequence[Visit]) -> Answers:
        """Have messages handled; waits, not for long, for what has become of others.

        Raises HostLostError if the agent is gone, or could not take messages.
        """
        import ray

        try:
            coming = self.agent.exchange.remote(self._packed(visits))
            looks = 0
            while not _is_there(coming, _LOOK_S):
                looks += 1
                if self.is_gone:
                    raise HostLostError("it was given up while it was asked")
                if looks >= _SILENT:
                    raise HostLostError(f"its agent gives no answer for {looks * _LOOK_S:.0f} s")
            answers, news = _get(coming)
            while self._taking and _is_there(self._taking[0]):
                _get(self._taking.popleft())  # raises what was raised there
        except ray.exceptions.RayTaskError as error:  # a fault of ours: the host is of no use for this run
            raise HostLostError(_cause(error)) from error
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise HostLostError(_first_line(error)) from error
        self.hear(news)
        found: Answers = answers
        return found

    def hear(self, news: News) -> None:
        """Log and write into the trace what the agent tells."""
        for level, line in news.lines:
            log(level, "Host %s: %s", self.name, line)
        self._tell([self._here(event) for event in news.events])

    def _here(self, event: Event) -> Event:
        """Return an event with the host's name, and with times of this machine's clock."""
        times = {
            name: value - self._clock_ahead_s
            for name, value in event.items()
            if (name == "time" or name.endswith("_at")) and isinstance(value, float)
        }
        return {**event, **times, "host": self.name}

    def _packed(self, visits: Sequence[Visit]) -> list[PackedVisit]:
        return [self._models.packed(visit) for visit in visits]

    def ask_for_sum(self, group: int) -> None:
        """Have the sum of a group come with the next answers."""
        self.agent.ask_for_sum.remote(group)

    def forget(self, groups: Sequence[int]) -> None:
        """Give up groups."""
        self.agent.forget.remote(groups)

    def cancel(self, message_id: str) -> None:
        """Give up a message."""
        self.agent.cancel.remote(message_id)

    def joined(self) -> None:
        """Have the trace say that this host is there."""
        about = self.about
        told = {"concurrency": about.concurrency, "cores": about.cores, "gpus": about.gpus}
        self._tell([trace.make("host_joined", host=self.name, host_id=self.node, **told)])

    def lost(self, error: Exception, left: int) -> None:
        """Have the agent end, and say that this host is given up."""
        # If it is only out of reach, it must not go on beside the agent that comes after it.
        _kill(self)
        reason = shortened(_first_line(error))
        self._tell([trace.make("host_lost", host=self.name, host_id=self.node, reason=reason)])
        log(
            WARNING,
            "Host %s is lost (%s). Its messages are handled by others: %s",
            self.name,
            reason,
            f"{left} hosts are left" if left != 1 else "1 host is left",
        )


class RayHosts:
    """The hosts of a Ray cluster. To be used in :func:`connected`.

    ``work``: what hosts must know of the run.
    Raises ConfigError if a host cannot do the work: it lacks a package, or has another version.
    """

    def __init__(self, work: Work) -> None:
        import ray

        self._ray: Any = ray
        self._work = work
        self._packages = packages_of(work.app)
        self._models = SentModels(ray.put)
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._kept: list[Event] | None = []  # until the run has begun
        self._all: list[RemoteHost] = []
        self._facts: dict[int, dict[str, Any]] = {}
        self._all += self._started(self._nodes_alive())
        if not self._all:
            raise ConfigError("the Ray cluster has no host")
        # Machines without an agent: when they are asked again, and after how many seconds.
        self._refused: dict[str, tuple[float, float]] = {}
        self._watcher: threading.Thread | None = None

    @property
    def there(self) -> list[RemoteHost]:
        """The hosts that are not lost."""
        return [host for host in self._all if not host.is_gone]

    @property
    def about(self) -> About:
        """What the first host says of itself, with the messages that all hosts handle at a time."""
        return replace(self._all[0].about, concurrency=sum(host.about.concurrency for host in self.there))

    def where(self) -> str:
        """Say where messages are handled."""
        return f"calls run on the hosts of a Ray cluster: up to {self.about.concurrency} at a time"

    def load_data(self) -> None:
        """Do nothing: each agent has loaded its data when it began."""

    def begin(self, joined: Callable[[Host], object]) -> None:
        """Tell of the hosts that are there, and from now on of those that join."""
        for host in self.there:
            host.joined()
            joined(host)
        self._watcher = threading.Thread(
            target=self._look_for_more, args=(joined,), name="flower-gpu-hosts", daemon=True
        )
        self._watcher.start()

    def facts(self) -> dict[str, Any]:
        """Return the hosts' facts for the result."""
        for host, told in self._answers([(host, host.agent.facts.remote()) for host in self.there]):
            self._facts[id(host)] = told
        found = list(self._facts.values())
        by_node: dict[str, list[RemoteHost]] = {}
        for host in self._all:
            by_node.setdefault(host.node, []).append(host)
        return {
            "workers_started": sum(each.get("workers_started", 0) for each in found),
            "peak_worker_bytes": max((each.get("peak_worker_bytes", 0) for each in found), default=0),
            "batches": {
                name: sum(each.get("batches", {}).get(name, 0) for each in found)
                for name in ("count", "messages")
            },
            "hosts": [
                {
                    "host": agents[0].name,
                    "host_id": node,
                    "messages": sum(host.messages for host in agents),
                    "failed": sum(host.failed for host in agents),
                    "workers_started": sum(
                        self._facts.get(id(host), {}).get("workers_started", 0) for host in agents
                    ),
                    "agents_lost": sum(host.is_gone for host in agents),
                    "is_lost": all(host.is_gone for host in agents),
                }
                for node, agents in by_node.items()
            ],
        }

    def close(self) -> None:
        """End the workers of all hosts, and take their last news."""
        self._is_closed.set()
        if self._watcher is not None:
            self._watcher.join(_ANSWER_S)
        hosts = self.there
        for host, news in self._answers([(host, host.agent.close.remote()) for host in hosts]):
            host.hear(news)
        for host in hosts:  # threads that wait for it go on
            _kill(host)

    def _answers(self, asked: Sequence[tuple[RemoteHost, Any]]) -> Iterator[tuple[RemoteHost, Any]]:
        """Yield hosts' answers, except of those that need too long, or are gone."""
        deadline = time.monotonic() + _ANSWER_S
        for host, coming in asked:
            with suppress(self._ray.exceptions.RayError, TimeoutError, ConnectionError):
                yield host, _get(coming, max(0.0, deadline - time.monotonic()))

    def _look_for_more(self, joined: Callable[[Host], object]) -> None:
        """Look for hosts that have joined, or whose agent is gone."""
        while not self._is_closed.wait(_JOIN_S):
            known = {host.node for host in self.there}
            try:
                nodes = self._nodes_alive()
            except Exception:  # of many kinds: Ray cannot be reached, for a while or for good
                continue
            for node in nodes:
                due, wait_s = self._refused.get(node, (0.0, _JOIN_S))
                if node in known or time.monotonic() < due:
                    continue
                try:
                    started = self._started([node])
                except ConfigError as error:
                    self._refused[node] = time.monotonic() + 2 * wait_s, 2 * wait_s
                    log(WARNING, "A host that has joined cannot be used: %s", error)
                    continue
                for host in started:
                    log(INFO, "Host %s has joined", host.name)
                    self._all.append(host)
                    host.joined()
                    joined(host)

    def has_begun(self) -> None:
        """Write into the trace what hosts tell, from now on."""
        with self._lock:
            kept, self._kept = self._kept or [], None
        self._write(kept)

    def _write(self, events: Iterable[Event]) -> None:
        with self._lock:
            if self._kept is not None:
                self._kept += events
                return
        if folder := os.environ.get(RUN_DIR_VARIABLE):
            for event in events:
                trace.append(folder, event)

    def _nodes_alive(self) -> list[str]:
        _check_connection()
        return [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]

    def _started(self, nodes: Sequence[str]) -> list[RemoteHost]:
        """Start an agent on each of these hosts, all at a time. Those that die meanwhile are left out.

        Raises ConfigError if an agent says that its host cannot do the work, or if none starts at all.
        """
        if not nodes:
            return []
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._ray.remote(Agent)
        agents = [
            actor.options(
                num_cpus=0,
                num_gpus=0,
                max_concurrency=_CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote(self._work)
            for node in nodes
        ]
        asked = [agent.begin.remote(self._packages) for agent in agents]
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes()}
        hosts: list[RemoteHost] = []
        dead: list[str] = []
        for node, agent, coming in zip(nodes, agents, asked, strict=True):
            try:
                while not self._ray.wait([coming], timeout=_LOOK_S)[0]:
                    if self._is_closed.is_set():
                        return []
                about: About = self._ray.get(coming)
                ahead_s = self._ahead_s(agent)
                host = RemoteHost(about, node, agent, ahead_s, self._models, self._write)
            except self._ray.exceptions.RayTaskError as error:
                raise ConfigError(f"host {names[node]}: {_cause(error)}") from error
            except self._ray.exceptions.RayError as error:
                dead.append(f"host {names[node]}: no agent can be started there: {_first_line(error)}")
                continue
            self._check(about)
            hosts.append(host)
        if dead and not hosts:
            raise ConfigError("; ".join(dead))
        for line in dead:
            log(WARNING, "The others begin without %s", line)
        return hosts

    def _ahead_s(self, agent: Any) -> float:
        """Return by how much the clock of an agent's host is ahead of this one's, if that can be told."""
        before = time.time()
        ahead_s: float = self._ray.get(agent.clock_s.remote()) - (before + time.time()) / 2
        return ahead_s if abs(ahead_s) > max(_SKEW_S, time.time() - before) else 0.0

    def _check(self, about: About) -> None:
        """Check that a host has the versions that all have, and what a deterministic run needs."""
        here = determinism.described([])["versions"]
        theirs = about.described["versions"]
        different = [
            f"{name} {theirs.get(name, 'not installed')} there and {here.get(name, 'not installed')} on "
            f"{socket.gethostname()}"
            for name in _SAME
            if theirs.get(name) != here.get(name)
        ]
        if different:
            raise ConfigError(f"host {about.name}: {'; '.join(different)}. Install the same on all hosts")
        first = self._all[0].about.described if self._all else about.described
        if self._work.is_strict and first != about.described:
            raise ConfigError(
                f"host {about.name} has other processors, GPUs or versions than the others "
                f"({about.described} there, {first} elsewhere): --deterministic needs equal hosts"
            )


def _is_there(coming: Any, timeout_s: float = 0.0) -> bool:
    """Tell whether an answer, or each of a list, is there; it is not fetched from its host.

    Raises ConnectionError if Ray cannot be reached.
    """
    import ray

    _check_connection()
    asked = coming if isinstance(coming, list) else [coming]
    return not ray.wait(asked, num_returns=len(asked), timeout=timeout_s, fetch_local=False)[1]


def _get(coming: Any, timeout_s: float | None = None) -> Any:
    """Return the result of a call of Ray.

    Raises ConnectionError, RayError, TimeoutError if there is no answer.
    """
    import ray

    _check_connection()
    return ray.get(coming, timeout=timeout_s)


def _kill(host: RemoteHost) -> None:
    """End an agent, if Ray can be reached."""
    import ray

    with suppress(Exception):
        _check_connection()
        ray.kill(host.agent)


def _check_connection() -> None:
    """Check that this process is part of the cluster: else Ray's functions would start one of their own.

    Raises ConnectionError if it is not any more.
    """
    import ray

    if not ray.is_initialized():
        raise ConnectionError("the connection to the Ray cluster is lost")


def _check_is_there(address: str) -> None:
    """Check that somebody listens at an address: Ray itself would try for minutes.

    Raises OSError if nobody does.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _cause(error: Any) -> str:
    """Return a host's exception in a line."""
    cause = error.cause if error.cause is not None else error
    return shortened(str(cause).strip().rpartition("\n")[2])
