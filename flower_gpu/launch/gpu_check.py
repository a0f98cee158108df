"""Whether this host can ever give what a run's calls ask for: looked at before anything starts.

What an app's own code asks for is not known here; the ledger refuses that as soon as it is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.errors import ConfigError, GPUUnavailableError, LeaseError
from flower_gpu.gpu import admission, inventory, policy
from flower_gpu.gpu.admission import Option
from flower_gpu.gpu.footprint import Footprints
from flower_gpu.gpu.inventory import GPU, Inventory
from flower_gpu.gpu.ledger import Ledger
from flower_gpu.gpu.policy import DevicePolicy
from flower_gpu.gpu.request import NODE_KEYS, Request, format_bytes
from flower_gpu.gpu.settings import GPUSettings
from flower_gpu.launch.gpu_options import GPUOptions, node_environment

if TYPE_CHECKING:
    from flower_gpu.launch.plan import Plan

_SERVER: Final = "the server"
_NO_GPU: Final = "no GPU can be used here (see flower-gpu gpus)"


@dataclass(frozen=True)
class _Callers:
    """Those whose calls may use the same GPUs."""

    names: tuple[str, ...]
    settings: GPUSettings
    are_all: bool
    in_node_config: str | None

    def __str__(self) -> str:
        if len(self.names) > 4:
            return f"{len(self.names)} of the clients"
        return " and ".join(filter(None, [", ".join(self.names[:-1]), self.names[-1]]))

    @property
    def prefix(self) -> str:
        """What a message begins with where it is not about everybody."""
        return "" if self.are_all else f"{self}: "


def check(plan: Plan, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Check a plan's GPU settings against this host.

    Parameters
    ----------
    plan : Plan
        What is to be run.
    environ : mapping of str to str
        The launcher's environment.

    Returns
    -------
    tuple of str
        What the user should know: how many calls fit at a time, which settings have no effect, which GPUs are
        used instead of others.

    Raises
    ------
    ConfigError
        If a setting cannot be used, or no GPU of this host can ever give what is asked for; the message says
        what would fit.
    """
    env = plan.gpu.environment(environ)
    try:
        return tuple(_check(plan, env))
    except (TypeError, ConfigError, GPUUnavailableError, LeaseError) as error:
        raise ConfigError(plan.gpu.in_their_words(str(error))) from error


def not_obeyed(plan: Plan, result: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
    """Return what to say if calls used GPUs although the run wants none and no node forces it; else None.

    Parameters
    ----------
    plan : Plan
        What was run.
    result : mapping
        What came of it, as from :func:`flower_gpu.launch.result.build_result`.
    environ : mapping of str to str
        The launcher's environment.
    """
    if plan.run_config.get(policy.SERVER_KEY) is not False or "leases" not in result:
        return None
    words = {each.settings.policy.gpu for each in _callers(plan, plan.gpu.environment(environ))}
    if words & {"force", "require"}:
        return None
    return (
        f"{policy.SERVER_KEY} is false, but {result['leases']['count']} calls leased a GPU: {plan.app.name} "
        "must give context=context to its GPUClient and gpu_evaluate"
    )


def _check(plan: Plan, env: Mapping[str, str]) -> list[str]:
    callers = _callers(plan, env)
    use_gpu = callers[0].settings.requested({})
    asks_for_none = use_gpu is False and all(each.settings.policy.gpu == "offer" for each in callers)
    if asks_for_none or all(each.settings.policy.gpu == "never" for each in callers):
        host = Inventory((), None, None)  # nobody looks at a GPU: neither do we
    else:
        host = inventory.take(processes=False)
        inventory.close()
    # That an app says `use-gpu = true` by itself is no reason to warn where there is no GPU.
    wanted = use_gpu if use_gpu is False or policy.SERVER_KEY in plan.overrides else None
    lines: list[str] = []
    for each in callers:
        seen = inventory.visible(host, env.get("CUDA_VISIBLE_DEVICES"))
        hidden = [gpu for gpu in host.gpus if gpu not in seen and gpu.is_usable]
        try:
            decision = policy.decide(each.settings.policy, wanted, seen, host.problem, hidden=hidden)
        except GPUUnavailableError as error:
            raise ConfigError(f"{each.prefix}{error}") from None
        lines += [f"note: {each.prefix}{text}" for text in decision.warnings]
        if decision.on_gpu:
            gpus = [gpu for gpu in seen if gpu.uuid in decision.uuids]
            lines += _check_request(each, gpus, plan.gpu)
        elif not each.settings.request.is_auto:
            lines.append(f"note: {_without_effect(each, use_gpu, plan.gpu, env)}")
    return list(dict.fromkeys(lines))


def _callers(plan: Plan, env: Mapping[str, str]) -> list[_Callers]:
    """Put clients and server together that have the same policy and request; the rest is the same for all."""
    groups: dict[tuple[DevicePolicy, Request], list[str]] = {}
    settings: dict[tuple[DevicePolicy, Request], GPUSettings] = {}
    written: dict[tuple[DevicePolicy, Request], str | None] = {}

    def add(name: str, environ: Mapping[str, str], node_config: Mapping[str, object]) -> None:
        found = GPUSettings.resolve(node_config=node_config, run_config=plan.run_config, environ=environ)
        key = found.policy, found.request
        groups.setdefault(key, []).append(name)
        settings[key] = found
        own = [f"--node-config {each}={node_config[each]!r}" for each in NODE_KEYS if each in node_config]
        written.setdefault(key, own[0] if own else None)

    for client in range(plan.clients):
        node_config = plan.node_config_of(client)
        add(f"client {client}", node_environment(env, node_config), node_config)
    add(_SERVER, env, {})
    return [
        _Callers(tuple(names), settings[key], len(groups) == 1, written[key]) for key, names in groups.items()
    ]


def _check_request(callers: _Callers, gpus: Sequence[GPU], options: GPUOptions) -> list[str]:
    """Check that some day these GPUs can give what a call asks for, and say how often at a time."""
    settings = callers.settings
    request = settings.request
    sizes = Ledger(reserve_bytes=settings.reserve_bytes).sizes(gpus)
    contexts = {gpu.uuid: Footprints().context(gpu.name) for gpu in gpus}
    possible = {option.uuid for option in admission.possible(sizes, _options(request, gpus))}
    if request.memory_bytes is not None:
        possible = {uuid for uuid in possible if request.memory_bytes > contexts[uuid]}
    if len(possible) < request.count:
        why = _why_not(request, gpus, sizes, contexts)
        if request.count > 1 and options.gpu_num is not None and len(gpus) < len(options.gpu_num):
            why += " (--gpu-num gives each client one GPU; for more write --node-config 'gpu-num=\"0,1\"')"
        raise ConfigError(f"{callers.prefix}{_asked(callers, options)}: {why}")
    if request.is_auto or request.count > 1:
        return []
    rooms = [
        f"GPU {gpu.index} ({gpu.name}) has room for {_room(request, sizes[gpu.uuid])} at a time"
        for gpu in gpus
        if gpu.uuid in possible
    ]
    return [f"leases: {callers.prefix}{request.describe()} for a call; {', '.join(rooms)}"]


def _options(request: Request, gpus: Sequence[GPU]) -> list[Option]:
    """Return what the ledger will be asked; a call whose amount is not known yet is alone on a GPU."""
    return [
        Option(gpu.uuid, memory_bytes=request.memory_bytes, share=request.share, alone=request.is_auto)
        for gpu in gpus
    ]


def _room(request: Request, size_bytes: int) -> int:
    if request.memory_bytes is not None:
        return size_bytes // request.memory_bytes
    assert request.share is not None
    return math.floor(1 / request.share + 1e-9)


def _asked(callers: _Callers, options: GPUOptions) -> str:
    """Return what is asked for as the user has written it, with the option or variable it is from."""
    request = callers.settings.request
    if callers.in_node_config is not None:
        return callers.in_node_config
    if request.memory_bytes is not None:
        name = options.name_of("FLOWER_GPU_MEMORY")
        amount = options.gpu_memory or format_bytes(request.memory_bytes)
    else:
        name = options.name_of("FLOWER_GPU_NUM_GPUS")
        amount = "auto" if request.num_gpus is None else f"{request.num_gpus:g}"
    return f"{name} {amount}" if name.startswith("--") else f"{name}={amount}"


def _why_not(
    request: Request, gpus: Sequence[GPU], sizes: Mapping[str, int], contexts: Mapping[str, int]
) -> str:
    """Say what does not fit, and what would."""
    # Rounded down: whoever writes the number that is shown gets it.
    have = ", ".join(
        f"GPU {gpu.index} ({gpu.name}) has {max(0, sizes[gpu.uuid]) >> 20}MiB for leases" for gpu in gpus
    )
    if request.count > 1 and len(gpus) < request.count:
        listed = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in gpus)
        return f"a call may use {len(gpus)} here, {listed}; ask for at most {len(gpus)}"
    most = max(sizes.values())
    if request.memory_bytes is not None and request.memory_bytes > most:
        return f"no GPU can ever give so much: {have}; ask for at most {max(0, most) >> 20}MiB"
    if request.memory_bytes is not None:
        context = format_bytes(min(contexts.values()))
        return f"CUDA's own context takes {context} of it: {have}; ask for more than {context}"
    least = admission.LEAST_SHARE_BYTES
    shared = most * admission.SHARED_PART
    what = f"that is less than {format_bytes(least)}, too little for CUDA itself: {have}"
    if shared < least:
        return what
    return f"{what}; ask for at least {math.ceil(100 * least / shared) / 100:g}"


def _without_effect(
    callers: _Callers, use_gpu: bool | None, options: GPUOptions, env: Mapping[str, str]
) -> str:
    """Say why what is asked for of a GPU does not matter."""
    word = callers.settings.policy.gpu
    if word == "never":
        why = "the device policy is never"
    elif word == "offer" and use_gpu is False:
        why = f"{policy.SERVER_KEY} is false"
    elif env.get("CUDA_VISIBLE_DEVICES") is not None:
        why = f"{_NO_GPU}; CUDA_VISIBLE_DEVICES is {env['CUDA_VISIBLE_DEVICES']!r}"
    else:
        why = _NO_GPU
    who = "all calls" if callers.are_all else f"calls of {callers}"
    ranks = callers.settings.request.count
    but = f" but for distributed functions, which run in {ranks} ranks" if ranks > 1 else ""
    return f"{_asked(callers, options)} has no effect{but}: {who} run on the CPU, {why}"
