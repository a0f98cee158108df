"""The workers of a host: their number, and their settings."""

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
from flower_gpu.gpu.gpus import GPU
from flower_gpu.options import NUM_CPUS_VARIABLE
from flower_gpu.simulation.core_leases import CoreLeases
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call
from flower_gpu.workers.forkserver import client
from flower_gpu.workers.threads import available_cores, cores

_CONCURRENCY: Final = "FLOWER_GPU_CONCURRENCY"
_ROUNDING: Final = 1e-9  # what 2 / 0.1 may be off by
# What every worker needs, whatever the app imports.
_OURS: Final = ("flower_gpu.simulation.in_worker", "flower_gpu.calls.leased_worker", "numpy.random")
_WITHOUT_TORCH: Final = {
    "flwr",
    "numpy",
    "flower_gpu",
    "scipy",
    "sklearn",
    "pandas",
} | sys.stdlib_module_names
_SHARES: Final = 8  # of a GPU, where nobody says how large they are: the ledger lets in what has room


def concurrency(settings: CallSettings, leases: int, max_workers: int | None, nodes: int) -> int:
    """Return how many messages are handled at a time, at most: of cores and leases what is more."""
    if max_workers is not None:
        return min(max_workers, nodes)
    ranks = settings.gpu.request.count  # of each message, as long as it is on several GPUs
    at_once = cores() // ranks
    if settings.host.num_cpus is not None:
        at_once = int(available_cores() / settings.host.num_cpus + _ROUNDING)
    return min(max(1, at_once, leases), nodes)


def most_leases(settings: CallSettings, uuids: Sequence[str]) -> int:
    """Return how many leases a run can have at a time on these GPUs; a guess where it names no size."""
    if not uuids:
        return 0
    shares = sum(_shares_of(settings, gpu.total_bytes) for gpu in gpus() if gpu.uuid in uuids)
    return shares // settings.gpu.request.count


def gpus() -> list[GPU]:
    """Return the GPUs of this host that can be used."""
    try:
        return [gpu for gpu in inventory.take(processes=False).gpus if gpu.is_usable]
    finally:
        inventory.close()  # it holds their device files


def _shares_of(settings: CallSettings, total_bytes: int | None) -> int:
    request = settings.gpu.request
    if request.share:
        return max(1, int(1 / request.share + 1e-9))
    if request.memory_bytes and total_bytes:
        return max(1, total_bytes // request.memory_bytes)
    return _SHARES


def variables(count: int, env: Mapping[str, str] | None, num_cpus: float | None = None) -> dict[str, str]:
    """Return the environment variables of workers of which so many run at a time: they share the cores."""
    asked = {} if num_cpus is None else {NUM_CPUS_VARIABLE: f"{num_cpus:g}"}
    return {_CONCURRENCY: str(min(count, cores())), **asked, **(env or {})}


def core_leases(settings: CallSettings, count: int, name: str) -> CoreLeases:
    """Return the cores of a run of an app of which so many messages are handled at a time."""
    host = settings.host
    need = replace(host, at_once=count if host.num_cpus is None else None).cores(on_gpu=False)
    assert need is not None
    return CoreLeases(host, need.amount, count, f"messages of {name}")


def load_data(settings: CallSettings, env: Mapping[str, str], without: frozenset[str]) -> None:
    """Load data where workers are forked from, if there are such data.

    Raises WorkerStartError if that fails.
    """
    worker = settings.worker
    method = start.choose(worker.start_method, server_first=True)
    if worker.preload and method.from_server:
        call = Call("builtins:print", env=env, preload=worker.preload, without=without, label="preload")
        client.find(call, None, {}).close()


@dataclass(frozen=True)
class Needs:
    """What the workers of an app are forked with.

    ``modules``: libraries that they have use for.
    ``without``: those they have none for, which makes forks cheaper; as of a
    :class:`flower_gpu.workers.call.Call`.
    """

    modules: tuple[str, ...]
    without: frozenset[str] = frozenset()

    @classmethod
    def of(cls, libraries: Sequence[str]) -> Needs:
        """Find out what workers need whose app imports these libraries."""
        if not _may_use_torch(libraries):
            return cls((*_OURS, *libraries), frozenset({"torch"}))
        return cls((*_OURS, *libraries, "torch", *frameworks.imported_in_use("torch")))

    def learn_beside(self, settings: CallSettings) -> None:
        """Have the host's fork server import that, in a thread, before the first worker is forked.

        So this goes on while this process imports the ServerApp.
        """
        if not start.choose(settings.worker.start_method).from_server:
            return

        def learn() -> None:
            with suppress(FlowerGPUError, OSError):  # who needs a worker tries again, and tells
                client.learn(self.modules, self.without, client.LEARN_FOR_LIMITED_S)

        threading.Thread(target=learn, daemon=True).start()


def _may_use_torch(libraries: Sequence[str]) -> bool:
    # Of a library that is not known to do without, whoever wrote it may have used torch.
    tops = {name.partition(".")[0] for name in libraries}
    return "flower_gpu.pytorch" in libraries or bool(tops - _WITHOUT_TORCH)
