"""GPU work of Flower clients in worker processes that exit and give their memory back.

Every public name is imported on first use, so ``import flower_gpu`` loads neither torch nor flwr.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_gpu.calls.runner import run_in_worker as run_in_worker
    from flower_gpu.errors import ClientCallError as ClientCallError
    from flower_gpu.errors import ClientsFailedError as ClientsFailedError
    from flower_gpu.errors import ConfigError as ConfigError
    from flower_gpu.errors import DiskError as DiskError
    from flower_gpu.errors import FlowerGPUError as FlowerGPUError
    from flower_gpu.errors import GPUError as GPUError
    from flower_gpu.errors import GPUOutOfMemoryError as GPUOutOfMemoryError
    from flower_gpu.errors import GPUUnavailableError as GPUUnavailableError
    from flower_gpu.errors import InvalidResultError as InvalidResultError
    from flower_gpu.errors import LeaseError as LeaseError
    from flower_gpu.errors import LeaseTimeoutError as LeaseTimeoutError
    from flower_gpu.errors import NotDeterministicError as NotDeterministicError
    from flower_gpu.errors import RankError as RankError
    from flower_gpu.errors import WeightsError as WeightsError
    from flower_gpu.errors import WorkerDiedError as WorkerDiedError
    from flower_gpu.errors import WorkerError as WorkerError
    from flower_gpu.errors import WorkerStartError as WorkerStartError
    from flower_gpu.errors import WorkerTaskError as WorkerTaskError
    from flower_gpu.errors import WorkerTimeoutError as WorkerTimeoutError
    from flower_gpu.flower.client import GPUClient as GPUClient
    from flower_gpu.flower.client import gpu_client as gpu_client
    from flower_gpu.flower.many import evaluate_many as evaluate_many
    from flower_gpu.flower.many import message_seed as message_seed
    from flower_gpu.flower.many import train_many as train_many
    from flower_gpu.flower.mod import gpu_mod as gpu_mod
    from flower_gpu.options import CallOptions as CallOptions
    from flower_gpu.pytorch.device import device as device
    from flower_gpu.pytorch.device import to_device as to_device
    from flower_gpu.pytorch.device import to_numpy as to_numpy
    from flower_gpu.ranks.function import distributed as distributed
    from flower_gpu.simulation.options import SimulationOptions as SimulationOptions
    from flower_gpu.simulation.run import simulate as simulate
    from flower_gpu.simulation.simulation_result import SimulationResult as SimulationResult
    from flower_gpu.simulation.simulation_result import SimulationStoppedError as SimulationStoppedError
    from flower_gpu.strategies.evaluate import gpu_evaluate as gpu_evaluate
    from flower_gpu.strategies.fedbuff import FedBuff as FedBuff
    from flower_gpu.strategies.resuming.resumable import resumable as resumable
    from flower_gpu.strategies.strategy import FedAvg as FedAvg
    from flower_gpu.strategies.strategy import LegacyFedAvg as LegacyFedAvg
    from flower_gpu.workers.events import progress as progress

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
    "flower_gpu.strategies.strategy": "FedAvg LegacyFedAvg",
    "flower_gpu.strategies.fedbuff": "FedBuff",
    "flower_gpu.flower.client": "GPUClient gpu_client",
    "flower_gpu.pytorch.device": "device to_device to_numpy",
    "flower_gpu.ranks.function": "distributed",
    "flower_gpu.strategies.evaluate": "gpu_evaluate",
    "flower_gpu.flower.many": "evaluate_many message_seed train_many",
    "flower_gpu.flower.mod": "gpu_mod",
    "flower_gpu.strategies.resuming.resumable": "resumable",
    "flower_gpu.workers.events": "progress",
    "flower_gpu.calls.runner": "run_in_worker",
    "flower_gpu.simulation.options": "SimulationOptions",
    "flower_gpu.simulation.simulation_result": "SimulationResult SimulationStoppedError",
    "flower_gpu.simulation.run": "simulate",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next access costs nothing
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
