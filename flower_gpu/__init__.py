"""GPU work of Flower clients in worker processes that exit and give their memory back.

Every public name is imported on first use, so ``import flower_gpu`` loads neither torch nor flwr.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_gpu.calls.runner import run_in_worker
    from flower_gpu.errors import (
        ClientCallError,
        ClientsFailedError,
        ConfigError,
        DiskError,
        FlowerGPUError,
        GPUError,
        GPUOutOfMemoryError,
        GPUUnavailableError,
        InvalidResultError,
        LeaseError,
        LeaseTimeoutError,
        NotDeterministicError,
        RankError,
        WeightsError,
        WorkerDiedError,
        WorkerError,
        WorkerStartError,
        WorkerTaskError,
        WorkerTimeoutError,
    )
    from flower_gpu.flower.client import GPUClient, gpu_client
    from flower_gpu.flower.evaluate import gpu_evaluate
    from flower_gpu.flower.fedbuff import FedBuff
    from flower_gpu.flower.mod import gpu_mod
    from flower_gpu.flower.resuming.resumable import resumable
    from flower_gpu.flower.strategy import FedAvg, LegacyFedAvg
    from flower_gpu.options import CallOptions
    from flower_gpu.pytorch.device import device, to_device, to_numpy
    from flower_gpu.pytorch.vectorized import vectorized
    from flower_gpu.ranks.function import distributed
    from flower_gpu.simulation.run import simulate
    from flower_gpu.simulation.simulation_result import SimulationResult, SimulationStoppedError
    from flower_gpu.workers.events import progress

__version__ = "0.1.0"

#: The public names, by the modules that have them.
_HOMES = {
    "flower_gpu.errors": (
        "ClientCallError ClientsFailedError ConfigError DiskError FlowerGPUError GPUError "
        "GPUOutOfMemoryError GPUUnavailableError InvalidResultError LeaseError LeaseTimeoutError "
        "NotDeterministicError RankError WeightsError WorkerDiedError WorkerError "
        "WorkerStartError WorkerTaskError WorkerTimeoutError"
    ),
    "flower_gpu.options": "CallOptions",
    "flower_gpu.flower.strategy": "FedAvg LegacyFedAvg",
    "flower_gpu.flower.fedbuff": "FedBuff",
    "flower_gpu.flower.client": "GPUClient gpu_client",
    "flower_gpu.pytorch.device": "device to_device to_numpy",
    "flower_gpu.pytorch.vectorized": "vectorized",
    "flower_gpu.ranks.function": "distributed",
    "flower_gpu.flower.evaluate": "gpu_evaluate",
    "flower_gpu.flower.mod": "gpu_mod",
    "flower_gpu.flower.resuming.resumable": "resumable",
    "flower_gpu.workers.events": "progress",
    "flower_gpu.calls.runner": "run_in_worker",
    "flower_gpu.simulation.simulation_result": "SimulationResult SimulationStoppedError",
    "flower_gpu.simulation.run": "simulate",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "CallOptions",
    "ClientCallError",
    "ClientsFailedError",
    "ConfigError",
    "DiskError",
    "FedAvg",
    "FedBuff",
    "FlowerGPUError",
    "GPUClient",
    "GPUError",
    "GPUOutOfMemoryError",
    "GPUUnavailableError",
    "InvalidResultError",
    "LeaseError",
    "LeaseTimeoutError",
    "LegacyFedAvg",
    "NotDeterministicError",
    "RankError",
    "SimulationResult",
    "SimulationStoppedError",
    "WeightsError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStartError",
    "WorkerTaskError",
    "WorkerTimeoutError",
    "device",
    "distributed",
    "gpu_client",
    "gpu_evaluate",
    "gpu_mod",
    "progress",
    "resumable",
    "run_in_worker",
    "simulate",
    "to_device",
    "to_numpy",
    "vectorized",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next access costs nothing
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
