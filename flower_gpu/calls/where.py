"""Says where calls will run: on which GPUs and how many at a time, or why on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from flower_gpu import options
from flower_gpu.calls.settings import GPUSettings
from flower_gpu.gpu import policy
from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases.request import LeaseRequest
from flower_gpu.options import CallOptions
from flower_gpu.printable import format_bytes

_NO_GPU: Final = "no GPU can be used here (see flower-gpu gpus)"


def calls_run(
    settings: GPUSettings,
    gpus: Sequence[GPU],
    at_once: int | None,
    use_gpu: bool | None,
    env: Mapping[str, str],
) -> str:
    """Return the line that says where calls with these settings run.

    ``settings``: of the calls.
    ``gpus``: those that they may use; none: they run on the CPU.
    ``at_once``: how many run at a time, at most. None: as many as have room.
    ``use_gpu``: what the server wants.
    ``env``: the environment of the calls.
    """
    number = "as many at a time as have room" if at_once is None else f"up to {at_once} at a time"
    if gpus:
        names = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in gpus)
        return f"calls run on {names}: {number}"
    why = why_on_cpu(settings, use_gpu, env)
    return f"{'no GPU here' if why == _NO_GPU else why}: calls run on the CPU, {number}"


def why_on_cpu(settings: GPUSettings, use_gpu: bool | None, env: Mapping[str, str]) -> str:
    """Return why calls run on the CPU."""
    word = settings.policy.gpu
    if word == "never":
        return "the device policy is never"
    if word == "offer" and use_gpu is False:
        return f"{policy.SERVER_KEY} is false"
    if env.get("CUDA_VISIBLE_DEVICES") is not None:
        return f"{_NO_GPU}; CUDA_VISIBLE_DEVICES is {env['CUDA_VISIBLE_DEVICES']!r}"
    return _NO_GPU


def asked(request: LeaseRequest, calls: CallOptions) -> str:
    """Return what is asked for as the user has written it, with the option or variable it is from."""
    if request.memory_bytes is not None:
        name = options.name_of("FLOWER_GPU_MEMORY", calls)
        amount = str(calls.get("gpu_memory") or format_bytes(request.memory_bytes))
    else:
        name = options.name_of("FLOWER_GPU_NUM_GPUS", calls)
        amount = "auto" if request.num_gpus is None else f"{request.num_gpus:g}"
    return f"{name} {amount}" if name.startswith("--") else f"{name}={amount}"


def without_effect(asked: str, ranks: int, who: str, why: str) -> str:
    """Say that what is asked for of a GPU does not matter: such calls run on the CPU."""
    but = f" but for distributed functions, which run in {ranks} ranks" if ranks > 1 else ""
    return f"note: {asked} has no effect{but}: {who} run on the CPU, {why}"
