"""How calls run and what they want of the host's GPUs: from code, environment and Flower's configs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.errors import ConfigError
from flower_gpu.gpu.policy import DevicePolicy, requested
from flower_gpu.kinds import memory_bytes
from flower_gpu.leases.admission import CORES, HostNeed
from flower_gpu.leases.request import LeaseRequest
from flower_gpu.options import (
    CALL,
    CONCURRENCY_VARIABLE,
    CPU_LEASES_VARIABLE,
    HOST_RESERVE_VARIABLE,
    NUM_CPUS_VARIABLE,
    CallOptions,
    checked_value,
    environment,
    find,
    in_their_words,
    value_of,
)
from flower_gpu.workers.call import checked_preload
from flower_gpu.workers.threads import available_cores, cores, openmp_threads, planned_threads, threads_for

if TYPE_CHECKING:
    from flower_gpu.workers.confinement import Confinement

#: Every keyword that is an option.
OPTION_NAMES: Final = tuple(CallOptions.__annotations__)

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class WorkerSettings:
    """How the processes of calls are run."""

    start_method: str = "auto"  # one of START_METHODS
    timeout_s: float | None = None  # that a call may take, from its lease on, its worker's start included
    env: Mapping[str, str] = field(default_factory=dict)  # set before anything heavy is imported
    name: str | None = None  # the client's, in the trace and in messages
    threads: int = 1  # that torch and OpenMP use in a worker
    preload: tuple[tuple[str, Mapping[str, Any]], ...] = ()  # functions to call once, with their arguments
    confinement: Confinement | None = None  # what a worker keeps of this host; None: all

    def __post_init__(self) -> None:
        for key, value in self.env.items():
            if not (isinstance(key, str) and isinstance(value, str)):
                raise ConfigError(f"env maps names to strings, not {key!r} to {value!r}")
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))

    @classmethod
    def resolve(cls, options: Mapping[str, Any], *, default_name: str | None = None) -> WorkerSettings:
        """Check options, and fill what the code left open from the environment."""
        name, _ = find(["name"], options, os.environ).get("name", (default_name, ""))
        settings = cls(
            start_method=checked_value("start_method", options, os.environ),
            timeout_s=checked_value("timeout_s", options, os.environ),
            env=options.get("env") or {},
            name=name,
            preload=checked_preload(options.get("preload")),
        )
        return replace(settings, threads=planned_threads({**os.environ, **settings.env}))


@dataclass(frozen=True)
class GPUSettings:
    """What a call wants of the host's GPUs."""

    policy: DevicePolicy = field(default_factory=DevicePolicy)  # what this node allows
    request: LeaseRequest = field(default_factory=LeaseRequest)  # how much of a GPU
    run_config: Mapping[str, Any] = field(default_factory=dict)  # may say `use-gpu` for all calls of the run
    lease_timeout_s: float = CALL["lease_timeout_s"].default
    on_oom: str = "retry"
    placement: str = "spread"
    reserve_bytes: int = 256 << 20  # of each GPU, never leased

    @classmethod
    def resolve(
        cls,
        options: Mapping[str, Any] = _NOTHING,
        *,
        node_config: Mapping[str, Any] = _NOTHING,
        run_config: Mapping[str, Any] = _NOTHING,
        environ: Mapping[str, str] = _NOTHING,
    ) -> GPUSettings:
        """Fill what the code left open.

        Raises TypeError if a value has the wrong type.
        Raises ConfigError if a value cannot be used; the message names where it came from.
        """
        gpu, gpu_ids, num_gpus, gpu_memory = map(options.get, ("gpu", "gpu_ids", "num_gpus", "gpu_memory"))
        return cls(
            policy=DevicePolicy.resolve(gpu, gpu_ids, node_config, environ),
            request=LeaseRequest.resolve(num_gpus, gpu_memory, environ, node_config),
            run_config=run_config,
            lease_timeout_s=float(checked_value("lease_timeout_s", options, environ)),
            on_oom=checked_value("on_oom", options, environ),
            placement=value_of("FLOWER_GPU_PLACEMENT", environ),
            reserve_bytes=reserve_bytes(environ),
        )

    def requested(self, config: Mapping[str, Any]) -> bool | None:
        """Return whether the server wants a GPU for a call with this config; see :func:`policy.requested`."""
        return requested(config, self.run_config)


@dataclass(frozen=True)
class HostSettings:
    """What a call wants of the host's cores and main memory."""

    is_leased: bool = False  # else nothing of them is counted
    num_cpus: float | None = None  # asked for
    source: str = ""  # of that
    at_once: int | None = None  # how many calls may run at a time; None: that is not known
    timeout_s: float = math.inf  # for which a call waits for cores
    reserve_bytes: int | None = None  # of main memory; None: a part of it

    @classmethod
    def resolve(
        cls,
        options: Mapping[str, Any] = _NOTHING,
        *,
        node_config: Mapping[str, Any] = _NOTHING,
        environ: Mapping[str, str] = _NOTHING,
    ) -> HostSettings:
        """Fill what the code left open. Raises as :meth:`GPUSettings.resolve` does."""
        num_cpus, source = find(["num_cpus"], options, environ, node_config).get("num_cpus", (None, ""))
        kind = CALL["num_cpus"].kind
        if num_cpus is not None and kind is not None:
            kind.check(num_cpus, source)
        timeout = find(["lease_timeout_s"], options, environ)
        reserve = value_of(HOST_RESERVE_VARIABLE, environ)
        return cls(
            is_leased=value_of(CPU_LEASES_VARIABLE, environ) == "on",
            num_cpus=num_cpus,
            source=source,
            at_once=value_of(CONCURRENCY_VARIABLE, environ) if environ.get(CONCURRENCY_VARIABLE) else None,
            timeout_s=float(checked_value("lease_timeout_s", options, environ)) if timeout else math.inf,
            reserve_bytes=reserve and memory_bytes(reserve, HOST_RESERVE_VARIABLE, allow_zero=True),
        )

    def check(self) -> None:
        """Refuse to ask for more cores than there are.

        Raises ConfigError if that is so; else the call would wait for ever.
        """
        if self.is_leased and self.num_cpus is not None and self.num_cpus > (most := available_cores()):
            raise ConfigError(
                f"{self.source}={self.num_cpus:g} is more than there is: this process may use {most:g} "
                f"core{'' if most == 1 else 's'} here. Ask for at most {most:g}"
            )

    def cores(self, *, on_gpu: bool) -> HostNeed | None:
        """Return what a call asks for of the cores; None: nothing."""
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


def reserve_bytes(environ: Mapping[str, str]) -> int:
    """Return how much of each GPU is never leased."""
    variable = "FLOWER_GPU_RESERVE"
    return memory_bytes(value_of(variable, environ), variable, allow_zero=True)


@dataclass(frozen=True)
class CallSettings:
    """How calls are run: their processes, and what they want of the host's GPUs."""

    worker: WorkerSettings
    gpu: GPUSettings
    host: HostSettings = field(default_factory=HostSettings)

    @classmethod
    def resolve(cls, options: Mapping[str, Any], *, name: str | None = None) -> CallSettings:
        """Check options and fill what is missing.

        ``options``: as in :class:`CallOptions`.
        ``name``: name of the client where neither they nor the environment have one.
        Raises TypeError if there is no such option, or a value has the wrong type.
        Raises ConfigError if a value cannot be used.
        """
        if unknown := [option for option in options if option not in OPTION_NAMES]:
            raise TypeError(f"no option {unknown[0]!r}; there are {', '.join(CALL)}")
        context = options.get("context")
        if context is not None and not (hasattr(context, "node_config") and hasattr(context, "run_config")):
            raise TypeError(f"context must be Flower's Context, not {type(context).__name__}")
        worker = WorkerSettings.resolve(options, default_name=name)
        environ = {**os.environ, **worker.env}
        node_config = dict(context.node_config) if context is not None else {}
        run_config = dict(context.run_config) if context is not None else {}
        host = HostSettings.resolve(options, node_config=node_config, environ=environ)
        # What code or node ask for goes before a variable that a launcher has set for all clients.
        if host.num_cpus is not None and host.source != NUM_CPUS_VARIABLE and not openmp_threads(worker.env):
            worker = replace(worker, threads=threads_for(host.num_cpus, environ))
        gpu = GPUSettings.resolve(options, node_config=node_config, run_config=run_config, environ=environ)
        return cls(worker, gpu, host)

    def confined(self, confinement: Confinement | None) -> CallSettings:
        """Return the same with workers that keep only this of the host."""
        return replace(self, worker=replace(self.worker, confinement=confinement))

    def named(self, name: str) -> CallSettings:
        """Return the same for another client."""
        return replace(self, worker=replace(self.worker, name=name))


def split(arguments: Mapping[str, Any], **words: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take our options out of keyword arguments that also hold a user's own.

    ``words`` are options that a function names in its signature, by which type checkers know their words.

    Returns the options, and the rest.
    """
    return (
        {name: value for name, value in {**arguments, **words}.items() if name in OPTION_NAMES},
        {name: value for name, value in arguments.items() if name not in OPTION_NAMES},
    )


def checked_environment(given: Mapping[str, Any], base: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with these call options in it.

    Raises ConfigError if an option or a variable cannot be used.
    """
    env = environment(given, base)
    try:
        GPUSettings.resolve(environ=env)
        HostSettings.resolve(environ=env).check()
    except ConfigError as error:
        raise ConfigError(in_their_words(str(error), given)) from error
    return env
