"""The settings of calls, from code, environment and Flower's configs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
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
    joined,
    resolve_all,
)
from flower_gpu.workers.call import checked_preload
from flower_gpu.workers.threads import available_cores, cores, openmp_threads, threads_for

if TYPE_CHECKING:
    from flower_gpu.gpu.gpus import Inventory
    from flower_gpu.workers.confinement import Confinement

#: Names of all options.
OPTION_NAMES: Final = tuple(CallOptions.__annotations__)

_EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of the worker processes of calls."""

    start_method: str  # one of START_METHODS
    timeout_s: float | None  # limit of a call, from the grant of its lease, with the start of its worker
    env: Mapping[str, str]  # environment variables, set before heavy imports
    name: str | None  # name of the client in the trace and in messages
    preload: tuple[tuple[str, Mapping[str, Any]], ...]  # functions that are called once, with their arguments
    threads: int  # number of threads of torch and OpenMP in a worker
    confinement: Confinement | None = None  # access of a worker to this host; None: no limits


@dataclass(frozen=True)
class GPUSettings:
    """A call's request for GPUs."""

    policy: DevicePolicy  # policy of this node
    request: LeaseRequest  # requested amount of a GPU
    run_config: Mapping[str, Any]  # may have `use-gpu` for all calls of the run
    lease_timeout_s: float
    on_oom: str  # one of ON_OOM
    placement: str  # "spread": the GPU with the most room. "pack": the fullest with enough room
    reserve_bytes: int  # bytes of each GPU that are never leased
    # Share of a GPU's processors under MPS. None: the same share as of its memory
    compute: float | None = None
    # The host's GPUs as the caller has seen them. None: each call queries them
    inventory: Inventory | None = None

    def requested(self, config: Mapping[str, Any]) -> bool | None:
        """Return True or False as the server requests a GPU for a call with this config, or None if unset.

        Raises ConfigError if the value is not a boolean, because "yes", "false" and 1 could mean anything.
        """
        return USE_GPU.resolve(config={**self.run_config, **config})  # type: ignore[no-any-return]


@dataclass(frozen=True)
class HostSettings:
    """A call's request for cores and main memory of the host."""

    is_leased: bool  # False if cores and main memory are not counted
    num_cpus: float | None  # requested number of cores
    concurrency: int | None  # maximum number of calls at a time; None if unknown
    timeout_s: float  # maximum wait for cores
    reserve_bytes: int | None  # main memory that is never leased; None: a fraction of it

    def cores(self, *, on_gpu: bool) -> HostNeed | None:
        """Return the cores that a call requests, or None."""
        if self.num_cpus is not None:
            amount = max(1, int(1000 * self.num_cpus))
        elif on_gpu:
            return None
        elif self.concurrency is None:
            return HostNeed(CORES, 1000 * cores(), least=0)  # all free cores, without waiting
        else:
            share = cores() // self.concurrency
            amount = 1000 * share or max(1, 1000 * cores() // self.concurrency)
        return HostNeed(CORES, amount, least=amount)


@dataclass(frozen=True)
class CallSettings:
    """The settings of calls: their processes, and their requests to the host."""

    worker: WorkerSettings
    gpu: GPUSettings
    host: HostSettings
    # Resolves other options with the same environment, configs and names as these settings
    _resolve: Callable[..., CallSettings] = field(compare=False, repr=False)
    # The options from which the settings were resolved
    _options: Mapping[str, Any] = field(compare=False, repr=False)
    # Options of this client alone, for the trace
    client_overrides: Mapping[str, Any] = field(default_factory=dict)

    def derived(self, overrides: Mapping[str, Any] = _EMPTY, **parameters: Any) -> CallSettings:
        """Return settings of the same options, in which ``overrides`` take precedence.

        They are resolved again, with the environment variables and cores of the process that calls this. So
        settings that came from another host become settings of this host.

        ``parameters``: other parameters of :func:`call_settings` than these settings were resolved with.

        Raises the errors of :func:`call_settings`.
        """
        return self._resolve(joined(self._options, overrides), **parameters)

    def for_client(self, name: str) -> CallSettings:
        """Return the settings with a client's name, unless they name a client already."""
        return self.with_worker(name=self.worker.name or name)

    def with_worker(self, **changes: Any) -> CallSettings:
        """Return a copy with changed fields of ``worker``."""
        return replace(self, worker=replace(self.worker, **changes))


def call_settings(
    options: Mapping[str, Any],
    *,
    base: Mapping[str, str] | None = None,
    node_config: Mapping[str, Any] = _EMPTY,
    run_config: Mapping[str, Any] = _EMPTY,
    named: Callable[[str], str] = str,
) -> CallSettings:
    """Return checked settings. Missing options come from configs and environment.

    ``options``: options as in :class:`CallOptions`. Their context has both configs.
    ``base``: environment variables, by default of this process. The option ``env`` is added to them.
    ``named``: returns the name of an option for messages, as the user wrote it.

    Raises TypeError if an option does not exist, or code gives a value of a wrong type.
    Raises ConfigError if a value cannot be used. The message names its source.
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
    resolve = partial(call_settings, base=base, node_config=node_config, run_config=run_config, named=named)
    preload = checked_preload(options.get("preload"))
    values, given_values = resolve_all(options, environ, node_config, named)
    return CallSettings(
        WorkerSettings(
            start_method=values["start_method"],
            timeout_s=values["timeout_s"],
            env=env,
            name=values["name"],
            preload=preload,
            threads=_threads(values["num_cpus"], given_values.get("num_cpus"), env, environ),
        ),
        GPUSettings(
            policy=DevicePolicy(values["gpu"], values["gpu_ids"]),
            request=_request(values, given_values),
            run_config=run_config,
            lease_timeout_s=values["lease_timeout_s"],
            on_oom=values["on_oom"],
            placement=PLACEMENT.resolve(None, environ),
            reserve_bytes=RESERVE.resolve(None, environ),
            compute=values["gpu_compute"],
        ),
        _host_settings(values, given_values, environ),
        resolve,
        options,
    )


def _checked_env(env: Mapping[str, str]) -> Mapping[str, str]:
    if not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping of names to strings, not a {type(env).__name__}")
    for key, value in env.items():
        if not isinstance(key, str):
            raise ConfigError(f"env maps names to strings, and {key!r} is not a valid name")
        if not isinstance(value, str):
            # The message does not show the value, because it may be secret.
            raise ConfigError(f"env maps names to strings, and {key} has a {type(value).__name__}")
    return MappingProxyType(dict(env))


def _threads(
    num_cpus: float | None, requested: GivenValue | None, env: Mapping[str, str], environ: Mapping[str, str]
) -> int:
    """Return the number of threads of a worker: OMP_NUM_THREADS, or the number of cores of the call."""
    # A request by code or node overrides a variable that a launcher has set for all clients.
    is_explicit = requested is not None and not requested.is_variable
    return openmp_threads(env if is_explicit else environ) or threads_for(num_cpus, environ)


def _request(values: Mapping[str, Any], given_values: Mapping[str, GivenValue]) -> LeaseRequest:
    amount = given_values.get("num_gpus") or given_values.get("gpu_memory")
    if amount is None:
        return LeaseRequest()
    return LeaseRequest(values["num_gpus"], values["gpu_memory"], written=str(amount))


def _host_settings(
    values: Mapping[str, Any], given_values: Mapping[str, GivenValue], environ: Mapping[str, str]
) -> HostSettings:
    """Return a call's request for cores and main memory.

    Raises ConfigError if it has more cores than this process may use, because the call would wait forever.
    """
    settings = HostSettings(
        is_leased=CPU_LEASES.resolve(None, environ) == "on",
        num_cpus=values["num_cpus"],
        concurrency=CONCURRENCY.resolve(None, environ) if environ.get(CONCURRENCY.variable) else None,
        timeout_s=values["lease_timeout_s"] if "lease_timeout_s" in given_values else math.inf,
        reserve_bytes=HOST_RESERVE.resolve(None, environ),
    )
    if settings.is_leased and (settings.num_cpus or 0) > (available := available_cores()):
        raise ConfigError(
            f"{given_values['num_cpus']} is too much: this process may use {available:g} "
            f"core{'' if available == 1 else 's'} here. Ask for at most {available:g}"
        )
    return settings


def split(arguments: Mapping[str, Any], **words: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments. Return the options of a call, and the user's own arguments.

    ``words``: options that a function names in its signature, so that type checkers know their values.
    """
    return (
        {name: value for name, value in {**arguments, **words}.items() if name in OPTION_NAMES},
        {name: value for name, value in arguments.items() if name not in OPTION_NAMES},
    )


def command_settings(
    options: Mapping[str, Any],
    env: Mapping[str, str],
    node_config: Mapping[str, Any] = _EMPTY,
    run_config: Mapping[str, Any] = _EMPTY,
) -> CallSettings:
    """Return the settings of calls in processes that a command starts, or raise ConfigError.

    ``options``: options of the command, which errors name as on a command line.
    ``env``: environment of these processes.
    ``node_config``, ``run_config``: configs of these processes.
    """
    return call_settings(options, base=env, node_config=node_config, run_config=run_config, named=flag)


def checked_environment(options: Mapping[str, Any], base: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that contains these options of a command line.

    Raises ConfigError if an option or a variable cannot be used.
    """
    env = environment(options, base)
    command_settings(options, env)
    return env
