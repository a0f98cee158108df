"""The hosts of a Ray cluster, as the driver knows them: agents are started, asked for news, and lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, Final

from flwr.common.logger import log

from flower_gpu import trace
from flower_gpu.errors import ConfigError, FlowerGPUError, shortened
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.simulation import machine
from flower_gpu.simulation.cluster.agent import About, Agent, News, packages_of
from flower_gpu.simulation.cluster.visits import SummedPart, Visit, Visited
from flower_gpu.simulation.host import Work
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.trace import Event
from flower_gpu.workers.own_calls import restored_environment

#: Versions that must be the same on all hosts.
_SAME: Final = ("flower-gpu", "flwr", "torch")
#: What of an app's folder no host needs.
_NOT_SENT: Final = ["runs", ".git", ".venv", "__pycache__", "*.pyc"]
_OVERRIDES: Final = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
_NEWS_S: Final = 0.5  # between two questions for news
_LOOK_S: Final = 2.0  # between two looks whether a host has joined
_ANSWER_S: Final = 10.0  # that an agent has for its last words
# After so many looks for its answer an agent is taken for dead: it is stopped, or its disk hangs. Seconds are
# not counted: in those this process may have been stopped itself.
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


@dataclass(eq=False)
class RemoteHost:
    """An agent, and what is known of it.

    ``node``: Ray's id of the machine.
    ``about``: what the agent has said at its start.
    ``is_gone``: whether it is lost.
    ``is_full``: whether it can take no more messages at this moment.
    ``messages``, ``failed``: how many replies came from it, and how many of them were errors.
    ``pace``: how long its calls take, of what those of all hosts take.
    ``call_s``: how long it handles a message of each type, a mean of the last ones.
    """

    node: str
    about: About
    agent: Any
    ahead_s: float  # by which its clock is ahead of this one's
    is_gone: bool = False
    is_full: bool = False
    messages: int = 0
    failed: int = 0
    pace: float = 1.0
    call_s: dict[str, float] = field(default_factory=dict)
    _given: deque[Any] = field(default_factory=deque)  # calls that nobody has waited for

    @property
    def name(self) -> str:
        """The machine's."""
        return self.about.name

    def give(self, visits: list[Visit]) -> None:
        """Have messages handled. That there is no agent any more is told by :meth:`exchange`."""
        with suppress(ConnectionError):  # of a driver that is not on the cluster itself
            coming = self.agent.give.remote(visits)
            self._given.append(coming)

    def exchange(self, visits: list[Visit]) -> list[Visited]:
        """Have messages handled; waits, not for long, for others that are finished.

        Raises HostLostError if the agent is gone, or could not take messages.
        """
        given = [self._given.popleft() for _ in range(len(self._given))]
        finished: list[Visited] = self._got(lambda: [*given, self.agent.exchange.remote(visits)])[-1]
        return finished

    def taking(self, group: int) -> Any:
        """Ask for the sums of a group so far; :meth:`taken` waits for them."""
        return self.agent.take.remote(group)

    def taken(self, coming: Any) -> SummedPart | None:
        """Return what was asked for.

        Raises HostLostError if the agent is gone.
        """
        part: SummedPart | None = self._got(lambda: coming)
        return part

    def settle(self, group: int) -> None:
        """Have a group summed, all replies of which are there."""
        self.agent.settle.remote(group)

    def forget(self, groups: list[int]) -> None:
        """Give up groups."""
        self.agent.forget.remote(groups)

    def cancel(self, message_id: str) -> None:
        """Give up a message."""
        self.agent.cancel.remote(message_id)

    def _got(self, ask: Callable[[], Any]) -> Any:
        import ray

        try:
            coming = ask()
            while not _is_there(coming, _NEWS_S):
                if self.is_gone:
                    raise HostLostError("it was given up while it was asked")
            return _get(coming)
        except ray.exceptions.RayTaskError as error:  # a fault of ours: the host is of no use for this run
            raise HostLostError(_cause(error)) from error
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise HostLostError(_first_line(error)) from error


@dataclass
class Listener:
    """What is called when something happens to a host; each in some thread."""

    on_joined: Callable[[RemoteHost], None]
    on_lost: Callable[[RemoteHost], None]
    on_full: Callable[[RemoteHost, bool], None]  # and whether it is


class Hosts:
    """All hosts of a run. To be used in :func:`connected`.

    ``work``: what hosts must know of the run.
    ``run_id``: the run's.
    ``run_config``: the run config.
    Raises ConfigError if a host cannot do the work: it lacks a package, or has another version.
    """

    def __init__(self, work: Work, run_id: int, run_config: Mapping[str, Any]) -> None:
        import ray

        self._ray: Any = ray
        self._work = work
        self._run = run_id, dict(run_config)
        self._packages = packages_of(work.app)
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._listener: Listener | None = None
        self._kept: list[Event] | None = []  # until the run has begun
        self._all: list[RemoteHost] = []
        self._facts: dict[int, dict[str, Any]] = {}
        self._all += self._started(self._nodes_alive())
        if not self._all:
            raise ConfigError("the Ray cluster has no host")
        # Machines without an agent: when they are asked again, and after how many seconds.
        self._refused: dict[str, tuple[float, float]] = {}
        self._asked: dict[
            RemoteHost, tuple[Any, int]
        ] = {}  # for news to come, and how often it was looked for
        self._watchers = [
            threading.Thread(target=watch, name=f"flower-gpu-hosts-{number}", daemon=True)
            for number, watch in enumerate((self._hear_all, self._look_for_more))
        ]

    @property
    def there(self) -> list[RemoteHost]:
        """The hosts that are not lost."""
        return [host for host in self._all if not host.is_gone]

    @property
    def concurrency(self) -> int:
        """How many messages all hosts handle at a time, at most."""
        return sum(host.about.concurrency for host in self.there)

    @property
    def threads(self) -> int:
        """Threads of a worker's libraries, on the first host."""
        return self._all[0].about.threads

    def described(self) -> dict[str, Any]:
        """Return the models of processors and GPUs, and versions: those of the first host."""
        return self._all[0].about.described

    def begin(self, listener: Listener) -> None:
        """Tell of the hosts that are there, and from now on of those that join or are lost."""
        self._listener = listener
        for host in self.there:
            self._write([_joined(host)])
            listener.on_joined(host)
        for thread in self._watchers:
            thread.start()

    def lost(self, host: RemoteHost, error: Exception) -> None:
        """Take note that a host is gone; the second time nothing happens."""
        with self._lock:
            if host.is_gone or self._is_closed.is_set():
                return
            host.is_gone = True
        # If it is only out of reach, it must not go on beside the agent that comes after it.
        _kill(host)
        reason = shortened(_first_line(error))
        self._write([trace.make("host_lost", host=host.name, ray_node=host.node, reason=reason)])
        left = len(self.there)
        log(
            WARNING,
            "Host %s is lost (%s). Its messages are handled by others: %s",
            host.name,
            reason,
            f"{left} hosts are left" if left != 1 else "1 host is left",
        )
        if self._listener is not None:
            self._listener.on_lost(host)

    def facts(self) -> dict[str, Any]:
        """Return what the result is to hold of the hosts."""
        for host, told in self._answers([(host, host.agent.facts.remote()) for host in self.there]):
            self._facts[id(host)] = told
        found = list(self._facts.values())
        by_node: dict[str, list[RemoteHost]] = {}
        for host in self._all:
            by_node.setdefault(host.node, []).append(host)
        return {
            "workers_started": sum(each.get("workers_started", 0) for each in found),
            "peak_worker_bytes": max((each.get("peak_worker_bytes", 0) for each in found), default=0),
            "hosts": [
                {
                    "host": agents[0].name,
                    "ray_node": node,
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
        for thread in self._watchers:
            if thread.is_alive():
                thread.join(_ANSWER_S)
        hosts = self.there
        # What they have asked for already is told once.
        asked = [(host, coming) for host, (coming, _) in self._asked.items() if not host.is_gone]
        for host, news in self._answers(asked + [(host, host.agent.close.remote()) for host in hosts]):
            self._hear(host, news)
        for host in hosts:  # threads that wait for it go on
            _kill(host)

    def _answers(self, asked: Sequence[tuple[RemoteHost, Any]]) -> Iterator[tuple[RemoteHost, Any]]:
        """Yield what hosts answer; not those that need too long for it, or are gone."""
        deadline = time.monotonic() + _ANSWER_S
        for host, coming in asked:
            with suppress(self._ray.exceptions.RayError, TimeoutError, ConnectionError):
                yield host, _get(coming, max(0.0, deadline - time.monotonic()))

    def _hear_all(self) -> None:
        """Ask all hosts for news, each again when it has answered."""
        while not self._is_closed.wait(_NEWS_S):
            there = self.there
            asked = self._asked = {host: self._asked[host] for host in there if host in self._asked}
            with suppress(ConnectionError):  # the threads that exchange messages tell of that
                for host in there:
                    if host not in asked:
                        asked[host] = host.agent.news.remote(), 0
            for host, (coming, looks) in list(asked.items()):
                try:
                    if _is_there(coming):
                        self._hear(host, _get(coming, _ANSWER_S))
                        del asked[host]
                        continue
                except TimeoutError:  # of a network that is gone for a while
                    pass
                except (self._ray.exceptions.RayError, ConnectionError) as error:
                    self.lost(host, error)
                asked[host] = coming, looks + 1
                if looks >= _SILENT:
                    self.lost(host, HostLostError(f"its agent gives no answer for {looks * _NEWS_S:.0f} s"))

    def _hear(self, host: RemoteHost, news: News) -> None:
        for level, line in news.lines:
            log(level, "Host %s: %s", host.name, line)
        if self._listener is None:
            return
        if news.events:
            self._write([_here(host, event) for event in news.events])
        self._listener.on_full(host, news.is_full)

    def _look_for_more(self) -> None:
        """Look for hosts that have joined, or whose agent is gone."""
        while not self._is_closed.wait(_LOOK_S):
            known = {host.node for host in self.there}
            try:
                nodes = self._nodes_alive()
            except Exception:  # of many kinds: Ray cannot be reached, for a while or for good
                continue
            for node in nodes:
                due, wait_s = self._refused.get(node, (0.0, _LOOK_S))
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
                    self._write([_joined(host)])
                    with self._lock:
                        self._all.append(host)
                    if self._listener is not None:
                        self._listener.on_joined(host)

    def write(self) -> None:
        """Write into the trace what hosts tell, from now on: the run has begun."""
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
            ).remote(self._work, *self._run)
            for node in nodes
        ]
        asked = [agent.begin.remote(self._packages) for agent in agents]
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes()}
        hosts: list[RemoteHost] = []
        dead: list[str] = []
        for node, agent, coming in zip(nodes, agents, asked, strict=True):
            try:
                while not self._ray.wait([coming], timeout=_NEWS_S)[0]:
                    if self._is_closed.is_set():
                        return []
                about: About = self._ray.get(coming)
                host = RemoteHost(node, about, agent, self._ahead_s(agent))
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
        here = machine.described([])["versions"]
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
                f"({about.described} there, {first} elsewhere): --deterministic wants hosts of one kind"
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
    """Return what was asked for.

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


def _joined(host: RemoteHost) -> Event:
    about = host.about
    told = {"concurrency": about.concurrency, "cores": about.cores, "gpus": about.gpus}
    return trace.make("host_joined", host=host.name, ray_node=host.node, **told)


def _here(host: RemoteHost, event: Event) -> Event:
    """Return an event of a host with its name, and with times of this machine's clock."""
    times = {
        name: value - host.ahead_s
        for name, value in event.items()
        if (name == "time" or name.endswith("_at")) and isinstance(value, float)
    }
    return {**event, **times, "host": host.name}


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
    """Return what was raised on a host, in a line."""
    cause = error.cause if error.cause is not None else error
    return shortened(str(cause).strip().rpartition("\n")[2])
