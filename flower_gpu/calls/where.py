"""Says where calls will run: on which GPUs and how many at a time, or why on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from flower_gpu.calls.settings import GPUSettings
from flower_gpu.gpu.gpus import GPU
from flower_gpu.leases.request import LeaseRequest
from flower_gpu.options import USE_GPU

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
        return f"{USE_GPU.run_config_key} is false"
    if env.get("CUDA_VISIBLE_DEVICES") is not None:
        return f"{_NO_GPU}; CUDA_VISIBLE_DEVICES is {env['CUDA_VISIBLE_DEVICES']!r}"
    return _NO_GPU


def without_effect(request: LeaseRequest, who: str, why: str) -> str:
    """Say that what is asked for of a GPU does not matter: such calls run on the CPU."""
    ranks = request.count
    but = f" but for distributed functions, which run in {ranks} ranks" if ranks > 1 else ""
    return f"note: {request.written} has no effect{but}: {who} run on the CPU, {why}"
