"""What a call wants of the host's GPUs, put together from code, environment and Flower's configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from flower_gpu.config import is_duration, too_long
from flower_gpu.errors import ConfigError
from flower_gpu.gpu.policy import DevicePolicy, requested
from flower_gpu.gpu.request import Request, memory_bytes

#: What can follow when a call runs out of GPU memory. ``retry``: it runs again with more of a GPU, at last
#: alone on one, and then fails. ``cpu``: and then it runs on the CPU. ``fail``: it fails at once.
ON_OOM: Final = ("retry", "cpu", "fail")

#: How leases are placed. ``spread``: on the GPU with the most room. ``pack``: on the one with the least that
#: is enough, which leaves others free for large requests.
PLACEMENTS: Final = ("spread", "pack")

#: A call may wait so long for its lease: half of what Flower gives a round by default.
LEASE_TIMEOUT_S: Final = 1800.0
#: ``timeout`` of ``flwr.serverapp.strategy.Strategy.start``, by default.
ROUND_TIMEOUT_S: Final = 3600.0
#: Kept free on each GPU, for what other programs take from one moment to the next.
RESERVE_BYTES: Final = 256 << 20

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class GPUSettings:
    """What a call wants of the host's GPUs.

    Parameters
    ----------
    policy : DevicePolicy
        What this node allows.
    request : Request
        How much of a GPU.
    run_config : mapping
        Where the server may say ``use-gpu`` for all calls of the run.
    lease_timeout_s : float
        Seconds the call may wait for its lease.
    round_timeout_s : float
        Seconds after which its round is over, so that it is not started any more.
    on_oom : str
        One of :data:`ON_OOM`.
    placement : str
        One of :data:`PLACEMENTS`.
    reserve_bytes : int
        Memory of each GPU that is never leased.
    """

    policy: DevicePolicy = field(default_factory=DevicePolicy)
    request: Request = field(default_factory=Request)
    run_config: Mapping[str, Any] = field(default_factory=dict)
    lease_timeout_s: float = LEASE_TIMEOUT_S
    round_timeout_s: float = ROUND_TIMEOUT_S
    on_oom: str = "retry"
    placement: str = "spread"
    reserve_bytes: int = RESERVE_BYTES

    @classmethod
    def resolve(
        cls,
        *,
        gpu: str | None = None,
        gpu_num: int | str | None = None,
        num_gpus: float | None = None,
        gpu_memory: int | str | None = None,
        lease_timeout_s: float | None = None,
        on_oom: str | None = None,
        node_config: Mapping[str, Any] = _NOTHING,
        run_config: Mapping[str, Any] = _NOTHING,
        environ: Mapping[str, str] = _NOTHING,
    ) -> GPUSettings:
        """Fill what the code left open.

        Raises
        ------
        TypeError
            If a value has the wrong type.
        ConfigError
            If a value cannot be used; the message names where it came from.
        """
        return cls(
            policy=DevicePolicy.resolve(gpu, gpu_num, node_config, environ),
            request=Request.resolve(num_gpus, gpu_memory, environ, node_config),
            run_config=run_config,
            lease_timeout_s=_seconds(
                lease_timeout_s, "lease_timeout_s", environ, "FLOWER_GPU_LEASE_TIMEOUT_S", LEASE_TIMEOUT_S
            ),
            round_timeout_s=_seconds(
                None, "round_timeout_s", environ, "FLOWER_GPU_ROUND_TIMEOUT_S", ROUND_TIMEOUT_S
            ),
            on_oom=_word(on_oom, "on_oom", environ, "FLOWER_GPU_ON_OOM", ON_OOM),
            placement=_word(None, "placement", environ, "FLOWER_GPU_PLACEMENT", PLACEMENTS),
            reserve_bytes=reserve_bytes(environ),
        )

    def requested(self, config: Mapping[str, Any]) -> bool | None:
        """Return whether the server wants a GPU for a call with this config; see :func:`policy.requested`."""
        return requested(config, self.run_config)


def reserve_bytes(environ: Mapping[str, str]) -> int:
    """Return how much of each GPU is never leased (``FLOWER_GPU_RESERVE``)."""
    text = environ.get("FLOWER_GPU_RESERVE")
    return memory_bytes(text, "FLOWER_GPU_RESERVE", allow_zero=True) if text else RESERVE_BYTES


def _seconds(value: Any, name: str, environ: Mapping[str, str], variable: str, default: float) -> float:
    text = environ.get(variable)
    if value is None and text:
        name, value = variable, text
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"{variable}={text!r} is not a number of seconds") from None
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not is_duration(value):
        raise ConfigError(f"{name} must be a positive number of seconds, not {value!r}{too_long(value)}")
    return float(value)


def _word(value: Any, name: str, environ: Mapping[str, str], variable: str, words: tuple[str, ...]) -> str:
    text = environ.get(variable)
    if value is None and text:
        name, value = variable, text
    if value is None:
        return words[0]
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(words)}, not {value!r}")
    if value not in words:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(words)}")
    return value
