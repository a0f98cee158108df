"""The settings of calls, from code, environment and Flower's configs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.errors import ConfigError
from flower_gpu.gpu.policy import DevicePolicy
from flower_gpu.leases.admission import CORES, HostNeed
from flower_gpu.leases.lease import LeaseRequest
from flower_gpu.options import (
    CALL,
    CONCURRENCY,
    CPU_LEASES,
    HOST_RESERVE,
    PLACEMENT,
    RESERVE,
    USE_GPU,
    CallOptions,
    GivenValue,
    environment,
    flag,
    resolve_all,
)
from flower_gpu.workers.call import checked_preload
from flower_gpu.workers.threads import available_cores, cores, openmp_threads, threads_for

if TYPE_CHECKING:
    from flower_gpu.gpu.gpus import Inventory
    from flower_gpu.workers.confinement import Confinement

#: Every keyword that is an option.
OPTION_NAMES: Final = tuple(CallOptions.__annotations__)

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class WorkerSettings:
    """How the processes of calls are run."""

    start_method: str  # one of START_METHODS
    timeout_s: float | None  # that a call may take, from its lease on, its worker's start included
    env: Mapping[str, str]  # set before anything heavy is imported
    name: str | None  # the client's, in the trace and in messages
    preload: tuple[tuple[str, Mapping[str, Any]], ...]  # functions to call once, with their arguments
    threads: int  # that torch and OpenMP use in a worker
    confinement: Confinement | None = None  # what a worker keeps of this host; None: all


@dataclass(frozen=True)
class GPUSettings:
    """What a call wants of the host's GPUs."""

    policy: DevicePolicy  # what this node allows
    request: LeaseRequest  # how much of a GPU
    run_config: Mapping[str, Any]  # may say `use-gpu` for all calls of the run
    lease_timeout_s: float
    on_oom: str  # one of ON_OOM
    placement: str  # "spread": on the GPU with the most room. "pack": on the fullest that has enough
    reserve_bytes: int  # of each GPU, never leased
    compute: float | None = None  # the share of a GPU's processors, where MPS can give it; None: as of memory
    inventory: Inventory | None = None  # what the caller has seen of the host; None: each call looks itself

    def requested(self, config: Mapping[str, Any]) -> bool | None:
        """Return whether the server wants a GPU for a call with this config; None where it does not say.

        Raises ConfigError if it says neither true nor false: "yes", "false" and 1 could mean anything.
        """
        return USE_GPU.resolve(config={**self.run_config, **config})  # type: ignore[no-any-return]


@dataclass(frozen=True)
class HostSettings:
    """What a call wants of the host's cores and main memory."""

    is_leased: bool  # else nothing of them is counted
    num_cpus: float | None  # asked for
    at_once: int | None  # how many calls may run at a time; None: that is not known
    timeout_s: float  # for which a call waits for cores
    reserve_bytes: int | None  # of main memory; None: a part of it

    def cores(self, *, on_gpu: bool) -> HostNeed | None:
        """Return the cores that a call asks for, or None."""
        if self.num_cpus is not None:
            amount = max(1, int(1000 * self.num_cpus))
        elif on_gpu:
            return None
        elif self.at_once is None:
            return HostNeed(CORES, 1000 * cores(), least=0)  # all that are free, without waiting
        else:
            share = cores() // self.at_once
            amount = 1000 * share or max(1, 1000 * cores() // self.at_once)
        return HostNeed(CORES, amount, least=amount)


@dataclass(frozen=True)
class CallSettings:
    """The settings of calls: their processes, and their requests to the host."""

    worker: WorkerSettings
    gpu: GPUSettings
    host: HostSettings
    own: Mapping[str, Any] = field(default_factory=dict)  # what this client alone has, for the trace

    def with_worker(self, **changes: Any) -> CallSettings:
        """Return the same with other values of some fields of ``worker``."""
        return replace(self, worker=replace(self.worker, **changes))


def call_settings(
    options: Mapping[str, Any],
    *,
    name: str | None = None,
    base: Mapping[str, str] | None = None,
    node_config: Mapping[str, Any] = _NOTHING,
    run_config: Mapping[str, Any] = _NOTHING,
    named: Callable[[str], str] = str,
) -> CallSettings:
    """Check options, and fill missing ones from configs and environment.

    ``options``: as in :class:`CallOptions`; their context has both configs.
    ``name``: name of the client where neither they nor the environment have one.
    ``base``: the environment; by default that of this process. The option ``env`` is added to it.
    ``named``: writes the name of an option for messages, as the user has given it.
    Raises TypeError if there is no such option, or code gives a value of a wrong type.
    Raises ConfigError if a value cannot be used; the message names where it comes from.
    """
    if unknown := [option for option in options if option not in OPTION_NAMES]:
        raise TypeError(f"no option {unknown[0]!r}; there are {', '.join(CALL)}")
    context = options.get("context")
    if context is not None:
        if not (hasattr(context, "node_config") and hasattr(context, "run_config")):
            raise TypeError(f"context must be Flower's Context, not {type(context).__name__}")
        node_config, run_config = dict(context.node_config), dict(context.run_config)
    env = _checked_env(options.get("env") or {})
    environ = {**(os.environ if base is None else base), **env}
    preload = checked_preload(options.get("preload"))
    values, given = resolve_all(options, environ, node_config, named)
    return CallSettings(
        WorkerSettings(
            start_method=values["start_method"],
            timeout_s=values["timeout_s"],
            env=env,
            name=values["name"] or name,
            preload=preload,
            threads=_threads(values["num_cpus"], given.get("num_cpus"), env, environ),
        ),
        GPUSettings(
            policy=DevicePolicy(values["gpu"], values["gpu_ids"]),
            request=_request(values, given),
            run_config=run_config,
            lease_timeout_s=values["lease_timeout_s"],
            on_oom=values["on_oom"],
            placement=PLACEMENT.resolve(None, environ),
            reserve_bytes=RESERVE.resolve(None, environ),
            compute=values["gpu_compute"],
        ),
        _host_settings(values, given, environ),
    )


def _checked_env(env: Mapping[str, str]) -> Mapping[str, str]:
    for key, value in env.items():
        if not isinstance(key, str):
            raise ConfigError(f"env maps names to strings, and {key!r} is not a valid name")
        if not isinstance(value, str):  # the value itself may be secret
            raise ConfigError(f"env maps names to strings, and {key} has a {type(value).__name__}")
    return MappingProxyType(dict(env))


def _threads(
    num_cpus: float | None, given: GivenValue | None, env: Mapping[str, str], environ: Mapping[str, str]
) -> int:
    """Return the threads of a worker: as OMP_NUM_THREADS says, or as many as the call asks for cores."""
    # What code or node ask for goes before a variable that a launcher has set for all clients.
    is_own = given is not None and not given.is_variable
    return openmp_threads(env if is_own else environ) or threads_for(num_cpus, environ)


def _request(values: Mapping[str, Any], given: Mapping[str, GivenValue]) -> LeaseRequest:
    amount = given.get("num_gpus") or given.get("gpu_memory")
    if amount is None:
        return LeaseRequest()
    return LeaseRequest(values["num_gpus"], values["gpu_memory"], written=str(amount))


def _host_settings(
    values: Mapping[str, Any], given: Mapping[str, GivenValue], environ: Mapping[str, str]
) -> HostSettings:
    """Return a call's requests to the host; refuse more cores than it has: the call would wait for ever."""
    settings = HostSettings(
        is_leased=CPU_LEASES.resolve(None, environ) == "on",
        num_cpus=values["num_cpus"],
        at_once=CONCURRENCY.resolve(None, environ) if environ.get(CONCURRENCY.variable) else None,
        timeout_s=values["lease_timeout_s"] if "lease_timeout_s" in given else math.inf,
        reserve_bytes=HOST_RESERVE.resolve(None, environ),
    )
    if settings.is_leased and (settings.num_cpus or 0) > (most := available_cores()):
        raise ConfigError(
            f"{given['num_cpus']} is too much: this process may use {most:g} "
            f"core{'' if most == 1 else 's'} here. Ask for at most {most:g}"
        )
    return settings


def split(arguments: Mapping[str, Any], **words: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take our options out of keyword arguments that also hold a user's own.

    ``words`` are options that a function names in its signature, by which type checkers know their words.

    Returns the options, and the rest.
    """
    return (
        {name: value for name, value in {**arguments, **words}.items() if name in OPTION_NAMES},
        {name: value for name, value in arguments.items() if name not in OPTION_NAMES},
    )


def checked_environment(options: Mapping[str, Any], base: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with these options of a command line in it.

    Raises ConfigError if an option or a variable cannot be used.
    """
    env = environment(options, base)
    call_settings(options, base=env, named=flag)
    return env
