"""The hosts of a Ray cluster as the driver sees them: starting agents, exchanging messages, detecting losses.

Threads of the driver:

- The dispatcher's giver calls :meth:`RemoteHost.submit`. Each host's exchange thread calls
  :meth:`RemoteHost.exchange` in a loop, and blocks there until the agent answers or counts as dead.
- The watcher of :class:`RayHosts` looks every 2 s for machines without an agent. It starts an agent there,
  and reports the new host to the dispatcher. A machine that cannot be used is tried again after growing
  delays.
- ``_write`` is called from all of these threads. Until the trace has the start of the run, it keeps events.

How a loss is detected: Ray reports that the actor or its machine is gone, the connection is lost, or the
agent gives no answer for a minute. ``exchange`` raises HostLostError then, and the dispatcher calls
:meth:`RemoteHost.lost`. The agent is killed, because it may only be unreachable. It must not run beside the
agent that the watcher starts on the same machine.
"""

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
from flower_gpu.printable import first_line
from flower_gpu.simulation import determinism
from flower_gpu.simulation.cluster.agent import Agent, News, packages_of
from flower_gpu.simulation.cluster.models import PackedMessage, SentModels
from flower_gpu.simulation.host import AssignedMessage, Host, HostInfo, HostReport, Work
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.trace import Event
from flower_gpu.workers.own_process import restored_environment

#: Versions that must be the same on all hosts.
_SAME: Final = ("flower-gpu", "flwr", "torch")
#: Parts of an app's folder that no host needs.
_NOT_SENT: Final = ["runs", ".git", ".venv", "__pycache__", "*.pyc"]
_OVERRIDES: Final = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
# Seconds to wait for an answer before checking if it is still wanted.
_LOOK_S: Final = 0.5
# Seconds between two searches for new hosts.
_JOIN_S: Final = 2.0
# Seconds that an agent has for its answer at the end of the run.
_ANSWER_S: Final = 10.0
# After this many waits without an answer, an agent counts as dead: it is stopped, or its disk hangs. Slow
# work on a living host, such as fetching a model, delays no answer. Waits are counted instead of seconds,
# because this process may have been stopped itself during those seconds.
_SILENT: Final = 120
# Concurrent calls of an agent's methods. One call waits for answers, and other calls are rare.
_CALLS: Final = 8
# If clocks differ by more than this many seconds, times in the trace are corrected.
_SKEW_S: Final = 0.05


class HostLostError(FlowerGPUError):
    """A host or its agent is gone."""


@contextmanager
def connected(address: str, app: object) -> Iterator[None]:
    """Connect to a Ray cluster for the block.

    ``address``: address for ``ray.init``: ``"auto"``, ``"host:port"`` or ``"ray://host:port"``.
    ``app``: the app. Its folder is sent to all hosts.

    Raises ConfigError if Ray is not installed or the cluster cannot be reached.
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
    previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _check_reachable(address)
        with restored_environment([_OVERRIDES]):
            # Agents choose the visible GPUs themselves. Without this variable, Ray warns about its default.
            os.environ[_OVERRIDES] = "0"
            ray.init(address, runtime_env=environment, log_to_driver=False, configure_logging=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--ray-address {address}: no Ray cluster can be reached "
            f"({first_line(str(error))}). Start one with `ray start --head`"
        ) from error
    if threading.current_thread() is threading.main_thread():
        # Ray's own handlers would end the run without its summary.
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


class RemoteHost(Host):
    """A host of the cluster with its agent.

    ``info``: description that the agent gave at its start.
    ``node``: Ray's id of the machine.
    ``agent``: handle of the Ray actor.
    ``clock_ahead_s``: seconds by which the host's clock is ahead of this machine's clock.
    ``models``: models in Ray's object store.
    ``tell``: function that takes events for the trace.
    """

    def __init__(
        self,
        info: HostInfo,
        node: str,
        agent: Any,
        clock_ahead_s: float,
        models: SentModels,
        tell: Callable[[Iterable[Event]], None],
    ) -> None:
        super().__init__(info)
        self.node = node
        self.agent = agent
        self._clock_ahead_s = clock_ahead_s
        self._models = models
        self._tell = tell
        self._taking: deque[Any] = deque()  # pending calls of the agent's ``submit``

    def submit(self, assigned_messages: Sequence[AssignedMessage]) -> None:
        """Send messages to the host. Does not fail if the agent is gone: :meth:`exchange` raises then."""
        # Only a driver outside the cluster can get this error.
        with suppress(ConnectionError):
            self._taking.append(self.agent.submit.remote(self._packed(assigned_messages)))

    def exchange(self, assigned_messages: Sequence[AssignedMessage]) -> HostReport:
        """Send messages to the host, and wait for its report on earlier messages.

        Raises HostLostError if the agent is gone, does not answer, or could not take messages.
        """
        import ray

        try:
            reference = self.agent.exchange.remote(self._packed(assigned_messages))
            looks = 0
            while not _is_ready(reference, _LOOK_S):
                looks += 1
                if self.is_gone:
                    raise HostLostError("it was dropped during a request")
                if looks >= _SILENT:
                    raise HostLostError(f"its agent has not answered for {looks * _LOOK_S:.0f} s")
            report, news = _get(reference)
            while self._taking and _is_ready(self._taking[0]):
                # Raises the exception of the agent's ``submit``, if it failed.
                _get(self._taking.popleft())
        # An exception in the agent is a fault of this package. The host cannot be used for this run.
        except ray.exceptions.RayTaskError as error:
            raise HostLostError(_cause(error)) from error
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise HostLostError(first_line(str(error))) from error
        self.hear(news)
        host_report: HostReport = report
        return host_report

    def hear(self, news: News) -> None:
        """Log the agent's warnings, and write its events into the trace."""
        for level, line in news.lines:
            log(level, "Host %s: %s", self.name, line)
        self._tell([self._localized(event) for event in news.events])

    def _localized(self, event: Event) -> Event:
        """Return an event with the host's name, and with times on this machine's clock."""
        times = {
            name: value - self._clock_ahead_s
            for name, value in event.items()
            if (name == "time" or name.endswith("_at")) and isinstance(value, float)
        }
        return {**event, **times, "host": self.name}

    def _packed(self, assigned_messages: Sequence[AssignedMessage]) -> list[PackedMessage]:
        return [self._models.packed(assigned) for assigned in assigned_messages]

    def ask_for_sum(self, group: int) -> None:
        """Request the sum of a group with the next answers."""
        self.agent.call.remote("ask_for_sum", group)

    def forget(self, group: int) -> None:
        """Drop the sum of an abandoned group."""
        self.agent.call.remote("forget", group)

    def cancel(self, message_id: str) -> None:
        """Cancel a message."""
        self.agent.call.remote("cancel", message_id)

    def joined(self) -> None:
        """Write into the trace that this host has joined."""
        info = self.info
        fields = {"concurrency": info.concurrency, "cores": info.cores, "gpus": info.gpus}
        self._tell([trace.make("host_joined", host=self.name, host_id=self.node, **fields)])

    def lost(self, error: Exception, remaining_hosts: int) -> None:
        """Kill the agent, and report the loss in the trace and the log."""
        # The agent may only be unreachable. It must not go on beside the agent that replaces it.
        _kill(self)
        reason = shortened(first_line(str(error)))
        self._tell([trace.make("host_lost", host=self.name, host_id=self.node, reason=reason)])
        log(
            WARNING,
            "Host %s is lost (%s). Other hosts handle its messages: %s",
            self.name,
            reason,
            f"{remaining_hosts} hosts are left" if remaining_hosts != 1 else "1 host is left",
        )


class RayHosts:
    """The hosts of a Ray cluster, for use in :func:`connected`.

    ``work``: description of the run for hosts.

    Raises ConfigError if a host cannot be used, because it lacks a package or has another version.
    """

    def __init__(self, work: Work) -> None:
        import ray

        self._ray: Any = ray
        self._work = work
        self._packages = packages_of(work.app)
        self._models = SentModels(ray.put)
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._kept: list[Event] | None = []  # events before the run has begun, then None
        self._all: list[RemoteHost] = []
        self._facts: dict[int, dict[str, Any]] = {}
        self._all += self._started(self._nodes_alive())
        if not self._all:
            raise ConfigError("the Ray cluster has no host")
        # Machines that cannot be used, by Ray's id: time of the next attempt, and delay before it in seconds
        self._refused: dict[str, tuple[float, float]] = {}
        self._watcher: threading.Thread | None = None

    @property
    def present_hosts(self) -> list[RemoteHost]:
        """The present hosts."""
        return [host for host in self._all if not host.is_gone]

    @property
    def info(self) -> HostInfo:
        """The description of the first host, with the concurrency of all hosts together."""
        return replace(
            self._all[0].info, concurrency=sum(host.info.concurrency for host in self.present_hosts)
        )

    def location_line(self) -> str:
        """Return a line that says where messages are handled."""
        return f"calls run on the hosts of a Ray cluster: up to {self.info.concurrency} at a time"

    def load_data(self) -> None:
        """Do nothing. Each agent has loaded its data at its start."""

    def begin(self, joined: Callable[[Host], object]) -> None:
        """Report the present hosts to ``joined``, and start the thread that reports new hosts."""
        for host in self.present_hosts:
            host.joined()
            joined(host)
        self._watcher = threading.Thread(
            target=self._look_for_more, args=(joined,), name="flower-gpu-hosts", daemon=True
        )
        self._watcher.start()

    def facts(self) -> dict[str, Any]:
        """Return the facts about hosts for the result. A silent host counts with its earlier facts."""
        for host, facts in self._results_of(lambda host: host.agent.call.remote("facts")):
            self._facts[id(host)] = facts
        all_facts = list(self._facts.values())
        by_node: dict[str, list[RemoteHost]] = {}
        for host in self._all:
            by_node.setdefault(host.node, []).append(host)
        return {
            "workers_started": sum(facts["workers_started"] for facts in all_facts),
            "peak_worker_bytes": max((facts["peak_worker_bytes"] for facts in all_facts), default=0),
            "batches": {
                name: sum(facts["batches"][name] for facts in all_facts) for name in ("count", "messages")
            },
            "hosts": [self._facts_of(node, agents) for node, agents in by_node.items()],
        }

    def _facts_of(self, node: str, agents: Sequence[RemoteHost]) -> dict[str, Any]:
        """Return the facts about a machine and all agents that it has had."""
        known = [self._facts[id(host)] for host in agents if id(host) in self._facts]
        return {
            "host": agents[0].name,
            "host_id": node,
            "messages": sum(host.messages for host in agents),
            "failed": sum(host.failed for host in agents),
            "workers_started": sum(facts["workers_started"] for facts in known),
            "agents_lost": sum(host.is_gone for host in agents),
            "is_lost": all(host.is_gone for host in agents),
        }

    def close(self) -> None:
        """End the workers of all hosts, write their last news, and kill the agents."""
        self._is_closed.set()
        if self._watcher is not None:
            self._watcher.join(_ANSWER_S)
        hosts = self.present_hosts
        for host, news in self._results_of(lambda host: host.agent.close.remote()):
            host.hear(news)
        # This wakes the threads that wait for an answer of the agent.
        for host in hosts:
            _kill(host)

    def _results_of(self, call: Callable[[RemoteHost], Any]) -> Iterator[tuple[RemoteHost, Any]]:
        """Yield the present hosts with the results of a call. Hosts that are too slow or gone are skipped.

        ``call``: starts the call of a host, and returns Ray's reference to the result.
        """
        references = [(host, call(host)) for host in self.present_hosts]
        deadline = time.monotonic() + _ANSWER_S
        for host, reference in references:
            with suppress(self._ray.exceptions.RayError, TimeoutError, ConnectionError):
                yield host, _get(reference, max(0.0, deadline - time.monotonic()))

    def _look_for_more(self, joined: Callable[[Host], object]) -> None:
        """Start agents on new machines, and on machines without an agent. Body of the watcher thread."""
        while not self._is_closed.wait(_JOIN_S):
            known = {host.node for host in self.present_hosts}
            try:
                nodes = self._nodes_alive()
            # Ray raises many kinds of exceptions if it cannot be reached. It may come back.
            except Exception:
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
        """Write the kept events into the trace. Later events are written at once."""
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
        """Start an agent on each of these machines at the same time, and return the hosts.

        Machines where the agent dies at its start are left out.

        ``nodes``: Ray's ids of the machines.

        Raises ConfigError if an agent reports that its host cannot be used, or if no agent starts.
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
        references = [agent.begin.remote(self._packages) for agent in agents]
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes()}
        hosts: list[RemoteHost] = []
        dead: list[str] = []
        for node, agent, reference in zip(nodes, agents, references, strict=True):
            try:
                while not self._ray.wait([reference], timeout=_LOOK_S)[0]:
                    if self._is_closed.is_set():
                        return []
                info: HostInfo = self._ray.get(reference)
                ahead_s = self._ahead_s(agent)
                host = RemoteHost(info, node, agent, ahead_s, self._models, self._write)
            except self._ray.exceptions.RayTaskError as error:
                raise ConfigError(f"host {names[node]}: {_cause(error)}") from error
            except self._ray.exceptions.RayError as error:
                dead.append(f"host {names[node]}: no agent can be started there: {first_line(str(error))}")
                continue
            self._check(info)
            hosts.append(host)
        if dead and not hosts:
            raise ConfigError("; ".join(dead))
        for line in dead:
            log(WARNING, "The others begin without %s", line)
        return hosts

    def _ahead_s(self, agent: Any) -> float:
        """Return the seconds by which the clock of an agent's host is ahead, or 0.0 if they are too few."""
        asked_at = time.time()
        ahead_s: float = self._ray.get(agent.clock_s.remote()) - (asked_at + time.time()) / 2
        return ahead_s if abs(ahead_s) > max(_SKEW_S, time.time() - asked_at) else 0.0

    def _check(self, info: HostInfo) -> None:
        """Check that a host has the same versions as this machine, and in a strict run equal hardware.

        Raises ConfigError if it differs.
        """
        here = determinism.described([])["versions"]
        theirs = info.described["versions"]
        different = [
            f"{name} {theirs.get(name, 'not installed')} there and {here.get(name, 'not installed')} on "
            f"{socket.gethostname()}"
            for name in _SAME
            if theirs.get(name) != here.get(name)
        ]
        if different:
            raise ConfigError(f"host {info.name}: {'; '.join(different)}. Install the same on all hosts")
        first = self._all[0].info.described if self._all else info.described
        if self._work.is_strict and first != info.described:
            raise ConfigError(
                f"host {info.name} has other processors, GPUs or versions than the others "
                f"({info.described} there, {first} elsewhere): --deterministic needs equal hosts"
            )


def _is_ready(reference: Any, timeout_s: float = 0.0) -> bool:
    """Return True if the result of a remote call exists. It is not fetched from its host.

    ``timeout_s``: seconds to wait for it.

    Raises ConnectionError if Ray cannot be reached.
    """
    import ray

    _check_connection()
    return bool(ray.wait([reference], timeout=timeout_s, fetch_local=False)[0])


def _get(reference: Any, timeout_s: float | None = None) -> Any:
    """Return the result of a remote call.

    Raises ConnectionError, RayError or TimeoutError if there is no result.
    """
    import ray

    _check_connection()
    return ray.get(reference, timeout=timeout_s)


def _kill(host: RemoteHost) -> None:
    """Kill an agent, if Ray can be reached."""
    import ray

    with suppress(Exception):
        _check_connection()
        ray.kill(host.agent)


def _check_connection() -> None:
    """Check that this process is still connected. Otherwise, Ray's functions would start a new cluster.

    Raises ConnectionError if the connection is lost.
    """
    import ray

    if not ray.is_initialized():
        raise ConnectionError("the connection to the Ray cluster is lost")


def _check_reachable(address: str) -> None:
    """Check that an address accepts connections. Ray itself would retry for minutes.

    Raises OSError if it does not.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


def _cause(error: Any) -> str:
    """Return the last line of a host's exception."""
    cause = error.cause if error.cause is not None else error
    return shortened(str(cause).strip().rpartition("\n")[2])
