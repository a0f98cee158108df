"""What a host does for a run: messages to virtual nodes are handled in its workers, with its leases."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp

from flower_gpu.apps.app_imports import libraries_of, libraries_used
from flower_gpu.calls import leasing, where
from flower_gpu.calls.settings import call_settings
from flower_gpu.errors import ConfigError, WorkerStartError
from flower_gpu.options import CallOptions, flag
from flower_gpu.simulation import determinism, workers
from flower_gpu.simulation.durations import Durations
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.lease_turns import LeaseTurns
from flower_gpu.simulation.messages import MANY, MessageHandler, Seeds
from flower_gpu.simulation.needs import Needs
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.slots import Slot
from flower_gpu.simulation.verifying import Verifier
from flower_gpu.workers.threads import planned_threads


@dataclass(frozen=True)
class Work:
    """What a host must know of a run. It can be pickled.

    ``name``: the app's.
    ``app``: what handles messages.
    ``options``: of each call.
    ``num_supernodes``: how many virtual nodes there are.
    ``max_workers``, ``calls_per_worker``, ``verify_recycling``, ``seed``: as :func:`flower_gpu.simulate` has
    them.
    ``is_deterministic``: whether algorithms must give the same bits each time.
    ``is_strict``: whether what another run would not have ends this one.
    """

    name: str
    app: AppReference | ClientApp
    options: CallOptions
    num_supernodes: int
    seed: int
    max_workers: int | None = None
    calls_per_worker: int = MANY
    verify_recycling: bool = False
    is_deterministic: bool = False
    is_strict: bool = False


class Host:
    """The host that this process is on, for one run.

    ``work``: what is to be done.
    ``gpus``: its GPUs that can be used.
    ``concurrency``: how many messages it handles at a time, at most.
    ``has_spare``: whether one more is of use while messages are short.
    ``threads``: of each worker's libraries.
    ``durations``: what messages take here.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._settings = settings = call_settings(work.options, named=flag)
        env = dict(work.options.get("env") or {})
        self.gpus = workers.gpus()
        self._decision = leasing.decide(settings.gpu, None, {**os.environ, **settings.worker.env})
        if work.is_deterministic:
            determinism.check_gpus(settings.gpu.on_oom, self.gpus, self._decision.uuids)
        self._leases = workers.most_leases(settings, self._decision.uuids)
        self.concurrency = workers.concurrency(settings, self._leases, work.max_workers, work.num_supernodes)
        self.has_spare = work.max_workers is None and not self._leases
        self._variables = workers.variables(self.concurrency, env, settings.host.num_cpus)
        self.threads = planned_threads({**os.environ, **self._variables})
        self._opened = ExitStack()

    def open(
        self, nodes: VirtualNodes, seed_of: Callable[[Message], int] | None = None, *, tries: int = 1
    ) -> MessageHandler:
        """Get ready for the messages to these nodes; returns what handles them, in any number of threads.

        ``nodes``: who is sent messages.
        ``seed_of``: returns the seed of a message, where it is not this process that counts what was sent.
        ``tries``: how often a message is handled, at most, whose worker dies.
        """
        work, settings = self._work, self._settings
        self.durations = Durations()
        needs = Needs.of(_libraries_of(work.app))
        needs.learn_beside(settings)
        self._without = needs.without
        turns = LeaseTurns(None if settings.gpu.request.is_auto else self._leases or None)
        cores_of_run = workers.core_leases(settings, self.concurrency, work.name)
        of_calls: dict[str, Any] = {**work.options, "env": self._variables}
        if not self.gpus:
            of_calls["gpu"] = "never"  # there is none: it need not be looked for with each message
        self._handler = handler = MessageHandler(
            work.app,
            nodes,
            of_calls,
            work.name,
            seed_of or Seeds(work.seed),
            lambda: Slot(turns, needs.without, cores_of_run),
            work.calls_per_worker,
            self.durations,
            verifier=Verifier() if work.verify_recycling else None,
            tries=tries,
            is_deterministic=work.is_deterministic,
            is_strict=work.is_strict,
        )
        self._opened.callback(cores_of_run.close)
        self._opened.callback(turns.close)
        self._opened.callback(handler.close)
        return handler

    def where(self) -> str:
        """Say where messages are handled, or what was asked for without effect."""
        gpu, env = self._settings.gpu, {**os.environ, **self._settings.worker.env}
        gpus = [one for one in self.gpus if one.uuid in self._decision.uuids]
        if not gpus and not gpu.request.is_auto:
            return where.without_effect(gpu.request, "all calls", where.why_on_cpu(gpu, None, env))
        at_once = None if gpus and gpu.request.is_auto else self.concurrency
        return where.calls_run(gpu, gpus, at_once, None, env)

    def load_data(self) -> None:
        """Load what calls find loaded, where there is something to load.

        Raises ConfigError if that fails: so the run ends here, and not each client's call.
        """
        try:
            workers.load_data(self._settings, self._variables, self._without)
        except WorkerStartError as error:
            raise ConfigError(str(error)) from error

    def end_workers(self) -> None:
        """Have all workers end at once; threads that wait for one go on."""
        self._handler.cancel_all()

    def close(self) -> None:
        """Let go of all that is held. No thread handles messages any more."""
        self._opened.close()


def _libraries_of(app: ClientApp | AppReference) -> list[str]:
    if isinstance(app, AppReference):
        return libraries_of(app.folder, app.name.partition(":")[0])
    return libraries_used(vars(app))
