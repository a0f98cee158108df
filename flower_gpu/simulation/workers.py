"""The workers of a host: their number, their environment, and their libraries.

The first functions decide how many messages a host handles at a time, and how many leases its GPUs can grant.
:class:`Needs` lists the libraries that workers are forked with.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from flower_gpu import frameworks
from flower_gpu.calls.settings import CallSettings
from flower_gpu.errors import FlowerGPUError
from flower_gpu.gpu import inventory
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.options import CALL, CONCURRENCY
from flower_gpu.simulation.leased_worker import CoreShare
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call
from flower_gpu.workers.forkserver import client
from flower_gpu.workers.threads import available_cores, cores

_ROUNDING: Final = 1e-9  # tolerance for quotients such as 2 / 0.1
# Modules that every worker needs, whatever the app imports
_OURS: Final = ("flower_gpu.simulation.in_worker", "flower_gpu.calls.grants", "numpy.random")
_WITHOUT_TORCH: Final = {
    "flwr",
    "numpy",
    "flower_gpu",
    "scipy",
    "sklearn",
    "pandas",
} | sys.stdlib_module_names
# Assumed number of leases per GPU if their size is unknown. The ledger admits only leases that
# have room.
_SHARES: Final = 8


def concurrency(settings: CallSettings, leases: int, max_workers: int | None, nodes: int) -> int:
    """Return the maximum number of messages in flight.

    By default, this is the number that the cores allow or the number of leases, whichever is larger.
    """
    if max_workers is not None:
        return min(max_workers, nodes)
    # A message that uses several GPUs has one rank for each of them.
    ranks = settings.gpu.request.count
    max_on_cores = cores() // ranks
    if settings.host.num_cpus is not None:
        max_on_cores = int(available_cores() / settings.host.num_cpus + _ROUNDING)
    return min(max(1, max_on_cores, leases), nodes)


def max_leases(settings: CallSettings, uuids: Sequence[str]) -> int:
    """Return the maximum number of leases of a run on these GPUs. It is a guess if its calls name no size."""
    if not uuids:
        return 0
    gpus = look_at_gpus().usable
    shares = sum(_shares_of(settings, gpu.total_bytes) for gpu in gpus if gpu.uuid in uuids)
    return shares // settings.gpu.request.count


def look_at_gpus() -> Inventory:
    """Return the GPUs of this host. No device file stays open."""
    try:
        return inventory.take(processes=False)
    finally:
        inventory.close()


def _shares_of(settings: CallSettings, total_bytes: int | None) -> int:
    request = settings.gpu.request
    if request.share:
        return max(1, int(1 / request.share + 1e-9))
    if request.memory_bytes and total_bytes:
        return max(1, total_bytes // request.memory_bytes)
    return _SHARES


def variables(count: int, env: Mapping[str, str] | None, num_cpus: float | None = None) -> dict[str, str]:
    """Return the environment variables of workers that share the cores.

    ``count``: number of workers that run at the same time.
    ``num_cpus``: cores that each call requests, or None.
    """
    requested = {} if num_cpus is None else {CALL["num_cpus"].variable: f"{num_cpus:g}"}
    return {CONCURRENCY.variable: str(min(count, cores())), **requested, **(env or {})}


def core_share(settings: CallSettings, count: int, max_leases: int, name: str) -> CoreShare | None:
    """Return the lease on cores that a message of a run needs by default, or None if cores are not counted.

    ``count``: number of messages that are handled at the same time.
    ``max_leases``: that number, if every message requested as few cores as the clients that request least.
    ``name``: name of the app.
    """
    host = settings.host
    if not host.is_leased:
        return None
    need = replace(host, concurrency=count if host.num_cpus is None else None).cores(on_gpu=False)
    assert need is not None
    return CoreShare(need.amount, max_leases, f"messages of {name}")


def load_data(settings: CallSettings, env: Mapping[str, str], without: frozenset[str]) -> None:
    """Load the data of the ``preload`` option in the fork server, if the run uses both.

    Raises WorkerStartError if loading fails.
    """
    worker = settings.worker
    method = start.choose(worker.start_method, server_first=True)
    if worker.preload and method.from_server:
        call = Call("builtins:print", env=env, preload=worker.preload, without=without, label="preload")
        client.find(call, None, {}).close()


@dataclass(frozen=True)
class Needs:
    """The libraries that the workers of an app are forked with.

    ``modules``: libraries that the workers use.
    ``without``: libraries that they do not use, as for :class:`flower_gpu.workers.call.Call`. Forks are
    cheaper without them.
    """

    modules: tuple[str, ...]
    without: frozenset[str] = frozenset()

    @classmethod
    def of(cls, libraries: Sequence[str]) -> Needs:
        """Return the needs of workers of an app that imports these libraries."""
        if not _may_use_torch(libraries):
            return cls((*_OURS, *libraries), frozenset({"torch"}))
        return cls((*_OURS, *libraries, "torch", *frameworks.imported_in_use("torch")))

    def learn_beside(self, settings: CallSettings) -> None:
        """Let the fork server import the modules in the background, before the first worker is forked.

        A thread waits for the fork server, so that this process can import the ServerApp at the same time.
        """
        if not start.choose(settings.worker.start_method).from_server:
            return

        def learn() -> None:
            # A call that needs a worker tries again, and reports the error.
            with suppress(FlowerGPUError, OSError):
                client.learn(self.modules, self.without, client.LEARN_FOR_LIMITED_S)

        # If no thread can start, the first worker waits for the imports.
        with suppress(RuntimeError):
            threading.Thread(target=learn, daemon=True).start()


def _may_use_torch(libraries: Sequence[str]) -> bool:
    # An unknown library may import torch itself.
    packages = {name.partition(".")[0] for name in libraries}
    return "flower_gpu.pytorch" in libraries or bool(packages - _WITHOUT_TORCH)
