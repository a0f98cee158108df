"""The machine of this process as a host, the only one of a run: its workers, with its leases."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

from flwr.clientapp import ClientApp

from flower_gpu.apps.app_imports import libraries_of, libraries_used
from flower_gpu.calls import leasing, notices
from flower_gpu.calls.settings import call_settings
from flower_gpu.errors import ConfigError, WorkerStartError
from flower_gpu.options import flag
from flower_gpu.simulation import determinism, machine, workers
from flower_gpu.simulation.host import About, Host, Work
from flower_gpu.simulation.host_queue import QueueHost
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.lease_turns import LeaseTurns
from flower_gpu.simulation.messages import MessageHandler
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.slots import Slot
from flower_gpu.workers.threads import cores, planned_threads


class LocalHost(QueueHost):
    """The machine that this process is on, for one run.

    ``work``: what is to be done.
    ``gpus``: its GPUs that can be used.
    """

    can_be_lost: ClassVar = False

    def __init__(self, work: Work) -> None:
        self._run = work
        self._settings = settings = call_settings(work.options, named=flag)
        env = dict(work.options.get("env") or {})
        self.gpus = workers.gpus()
        self._decision = leasing.decide(settings.gpu, None, {**os.environ, **settings.worker.env})
        if work.is_deterministic:
            determinism.check_gpus(settings.gpu.on_oom, self.gpus, self._decision.uuids)
        self._leases = workers.most_leases(settings, self._decision.uuids)
        concurrency = workers.concurrency(settings, self._leases, work.max_workers, work.num_supernodes)
        self._variables = workers.variables(concurrency, env, settings.host.num_cpus)
        threads = planned_threads({**os.environ, **self._variables})
        super().__init__(
            About(platform.node(), concurrency, threads, machine.described(self.gpus), cores(), [])
        )
        self._opened = ExitStack()

    @property
    def concurrency(self) -> int:
        """How many messages are handled at a time, at most."""
        return self.about.concurrency

    @property
    def threads(self) -> int:
        """Of each worker's libraries."""
        return self.about.threads

    def described(self) -> dict[str, Any]:
        """Return the models of processors and GPUs, and versions."""
        return self.about.described

    def begin(self, nodes: VirtualNodes, joined: Callable[[Host], object]) -> None:
        """Get ready for messages to these nodes, and ask for some."""
        self.open(nodes)
        joined(self)

    def open(self, nodes: VirtualNodes, *, tries: int = 1) -> None:
        """Get ready for the messages to these nodes.

        ``tries``: how often a message is handled, at most, whose worker dies.
        """
        work, settings = self._run, self._settings
        needs = workers.Needs.of(_libraries_of(work.app))
        needs.learn_beside(settings)
        self._without = needs.without
        turns = LeaseTurns(None if settings.gpu.request.is_auto else self._leases or None)
        cores_of_run = workers.core_leases(settings, self.concurrency, work.name)
        of_calls: dict[str, Any] = {**work.options, "env": self._variables}
        if not self.gpus:
            of_calls["gpu"] = "never"  # there is none: it need not be looked for with each message
        handler = self.handler = MessageHandler(
            work, nodes, of_calls, lambda: Slot(turns, needs.without, cores_of_run), tries=tries
        )
        self._opened.callback(cores_of_run.close)
        self._opened.callback(turns.close)
        self._opened.callback(handler.close)
        # One more while messages are short: it is written, or its reply read, while the others are computed.
        has_spare = work.max_workers is None and not self._leases
        self.start(handler, self.concurrency + has_spare)

    def where(self) -> str:
        """Return a line on the place of messages, or on options without effect."""
        gpu, env = self._settings.gpu, {**os.environ, **self._settings.worker.env}
        gpus = [one for one in self.gpus if one.uuid in self._decision.uuids]
        if not gpus and not gpu.request.is_auto:
            return notices.without_effect(gpu.request, "all calls", notices.why_on_cpu(gpu, None, env))
        at_once = None if gpus and gpu.request.is_auto else self.concurrency
        return notices.calls_run(gpu, gpus, at_once, None, env)

    def has_begun(self) -> None:
        """Do nothing: workers write into the trace themselves."""

    def load_data(self) -> None:
        """Load the data for calls, if there are any.

        Raises ConfigError if that fails: so the run ends here, and not each client's call.
        """
        try:
            workers.load_data(self._settings, self._variables, self._without)
        except WorkerStartError as error:
            raise ConfigError(str(error)) from error

    def facts(self) -> dict[str, Any]:
        """Return the workers' facts for the result."""
        return self.handler.facts()

    def close(self) -> None:
        """End all workers, and let go of all that is held."""
        super().close()
        self._opened.close()


def _libraries_of(app: ClientApp | AppReference) -> list[str]:
    if isinstance(app, AppReference):
        return libraries_of(app.folder, app.name.partition(":")[0])
    return libraries_used(vars(app))
