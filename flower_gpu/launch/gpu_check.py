"""Checks requests against this host's GPUs before anything starts, with the rules of admission.

Requests in an app's own code are not known here. The ledger refuses impossible ones at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flower_gpu import options
from flower_gpu.calls import leasing, notices
from flower_gpu.calls.settings import GPUSettings, command_settings
from flower_gpu.errors import ConfigError, GPUUnavailableError
from flower_gpu.gpu import inventory, policy
from flower_gpu.gpu.gpus import GPU, Inventory
from flower_gpu.leases import admission
from flower_gpu.leases.admission import Card, Claim, GPUNeed
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.lease import LeaseRequest
from flower_gpu.leases.ledger import Ledger
from flower_gpu.options import CALL, CallOptions
from flower_gpu.printable import format_bytes


@dataclass
class Callers:
    """Callers with the same device policy and the same request."""

    settings: GPUSettings
    names: list[str] = field(default_factory=list)
    are_all: bool = False

    def __str__(self) -> str:
        if len(self.names) > 4:
            return f"{len(self.names)} of the clients"
        return " and ".join(filter(None, [", ".join(self.names[:-1]), self.names[-1]]))

    @property
    def prefix(self) -> str:
        """Prefix of a message that is not about all callers, else an empty text."""
        return "" if self.are_all else f"{self}: "


def callers_of(
    node_configs: Mapping[str, Mapping[str, object]],
    run_config: Mapping[str, object],
    calls: CallOptions,
    environ: Mapping[str, str],
) -> list[Callers]:
    """Return the callers, grouped by policy and request. Other settings are equal for all.

    ``node_configs``: node configs by the names of the callers.

    Raises ConfigError if a setting cannot be used.
    """
    groups: dict[tuple[policy.DevicePolicy, LeaseRequest], Callers] = {}
    for name, config in node_configs.items():
        env = options.node_environment(environ, config)
        gpu = command_settings(calls, env, config, run_config).gpu
        groups.setdefault((gpu.policy, gpu.request), Callers(gpu)).names.append(name)
    for group in groups.values():
        group.are_all = len(groups) == 1
    return list(groups.values())


def check(
    callers: Sequence[Callers],
    calls: CallOptions,
    env: Mapping[str, str],
    *,
    is_given: bool,
    concurrency: int,
) -> list[str]:
    """Check callers' requests against this host's GPUs, and return notes for the user.

    The notes say how many calls fit at a time, which settings have no effect, and which GPUs are used instead
    of others.

    ``is_given``: whether the user, not only the app, decides if the run uses GPUs.
    ``concurrency``: number of clients that may train at a time.

    Raises ConfigError if no GPU of this host can ever grant a request. The message says which would fit.
    """
    use_gpu = callers[0].settings.requested({})
    words = {caller.settings.policy.gpu for caller in callers}
    if words == {"never"} or (use_gpu is False and words == {"offer"}):
        # No call will use a GPU, so the driver is not asked.
        host = Inventory((), None, None)
    else:
        host = inventory.take(processes=False)
        inventory.close()
    # If only the app sets `use-gpu = true`, a host without a GPU is no reason for a warning.
    wanted = use_gpu if use_gpu is False or is_given else None
    lines: list[str] = []
    for caller in callers:
        try:
            decision, gpus = leasing.decided(caller.settings, wanted, host, env)
        except GPUUnavailableError as error:
            raise ConfigError(f"{caller.prefix}{error}") from None
        lines += [f"note: {caller.prefix}{text}" for text in decision.warnings]
        if decision.on_gpu:
            lines += _check_request(caller, gpus, calls)
        elif not caller.settings.request.is_auto:
            who = "all calls" if caller.are_all else f"calls of {caller}"
            why = notices.why_on_cpu(caller.settings, use_gpu, env)
            lines.append(notices.without_effect(caller.settings.request, who, why))
        elif caller.are_all:
            lines.append(notices.calls_run(caller.settings, (), concurrency, use_gpu, env))
    return list(dict.fromkeys(lines))


def _check_request(callers: Callers, gpus: Sequence[GPU], calls: CallOptions) -> list[str]:
    """Check that these GPUs can ever grant a request. Return a note with the number of calls that fit."""
    settings = callers.settings
    request = settings.request
    why = why_never(request, gpus, settings.reserve_bytes)
    if why is not None:
        dealt_out = CALL["gpu_ids"].resolve(calls.get("gpu_ids")) or ()
        if request.count > 1 and len(gpus) < len(dealt_out):
            why += " (--gpu-ids gives each client one GPU; for more write --node-config 'gpu-ids=\"0,1\"')"
        raise ConfigError(f"{callers.prefix}{request.written}: {why}")
    if request.is_auto or request.count > 1:
        return [notices.calls_run(settings, gpus, None, None, os.environ)] if callers.are_all else []
    sizes = Ledger(reserve_bytes=settings.reserve_bytes).sizes(gpus)
    possible = {option.uuid: option for option in _possible(request, gpus, sizes)}
    rooms = [
        f"GPU {gpu.index} ({gpu.name}) has room for {_room(possible[gpu.uuid], sizes[gpu.uuid])} at a time"
        for gpu in gpus
        if gpu.uuid in possible
    ]
    return [f"leases: {callers.prefix}{request.describe()} for a call; {', '.join(rooms)}"]


def check_required(nodes: Iterable[GPUSettings], environ: Mapping[str, str]) -> None:
    """Check that this host's GPUs can serve the nodes that require one. Otherwise, all messages would fail.

    Raises GPUUnavailableError if there is no usable GPU.
    Raises ConfigError if the GPUs have too little memory.
    """
    required = {(caller.policy, caller.request): caller for caller in nodes if caller.policy.gpu == "require"}
    if not required:
        return
    host = inventory.take(processes=False)
    inventory.close()
    for settings in required.values():
        _, gpus = leasing.decided(settings, None, host, environ)
        why = why_never(settings.request, gpus, settings.reserve_bytes)
        if why is not None:
            raise ConfigError(f"{settings.request.describe()} for a call, and the policy is require: {why}")


def why_never(request: LeaseRequest, gpus: Sequence[GPU], reserve_bytes: int) -> str | None:
    """Return the reason why these GPUs can never grant a request, and the size that fits. None if they can.

    Raises LeaseError if the ledger cannot be used.
    """
    sizes = Ledger(reserve_bytes=reserve_bytes).sizes(gpus)
    if len(_possible(request, gpus, sizes)) >= request.count:
        return None
    if len(gpus) < request.count:
        listed = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in gpus)
        return f"a call may use {len(gpus)} here, {listed}; ask for at most {len(gpus)}"
    # Rounded down, so that a request for the number that is shown can be granted.
    have = ", ".join(
        f"GPU {gpu.index} ({gpu.name}) has {max(0, sizes[gpu.uuid]) >> 20}MiB for leases" for gpu in gpus
    )
    largest = max(sizes.values())
    if request.memory_bytes is not None and request.memory_bytes > largest:
        return f"no GPU has that much: {have}; ask for at most {max(0, largest) >> 20}MiB"
    if request.memory_bytes is not None:
        context = format_bytes(min(_contexts(gpus).values()))
        return f"CUDA's own context takes {context} of it: {have}; ask for more than {context}"
    needed = format_bytes(admission.LEAST_SHARE_BYTES)
    text = f"that is less than {needed}, too little for CUDA itself: {have}"
    shares = (hundredth / 100 for hundredth in range(1, 101))
    fits = (x for x in shares if admission.satisfiable(sizes, [GPUNeed(uuid, share=x) for uuid in sizes]))
    least = next(fits, None)
    return text if least is None else f"{text}; ask for at least {least:g}"


def _possible(request: LeaseRequest, gpus: Sequence[GPU], sizes: Mapping[str, int]) -> list[GPUNeed]:
    """Return the needs, one for each GPU that can ever grant the request, by the rules of admission.

    The amount must also have room for CUDA's context.
    """
    needs = [
        GPUNeed(
            gpu.uuid,
            memory_bytes=request.memory_bytes,
            share=request.share,
            # A call with an unknown footprint also gets a whole GPU.
            alone=request.is_auto or gpu.is_exclusive,
        )
        for gpu in gpus
    ]
    possible = admission.satisfiable(sizes, needs)
    if request.memory_bytes is None:
        return possible
    contexts = _contexts(gpus)
    return [option for option in possible if request.memory_bytes > contexts[option.uuid]]


def _contexts(gpus: Sequence[GPU]) -> dict[str, int]:
    footprints = Footprints()
    return {gpu.uuid: footprints.context(gpu.name) for gpu in gpus}


def _room(need: GPUNeed, size_bytes: int) -> int:
    """Return the number of such calls that can have a lease on an empty GPU at a time."""
    upper_bound = size_bytes // min(need.memory_bytes or size_bytes, admission.LEAST_SHARE_BYTES)
    claims = [Claim(str(order), order, (need,)) for order in range(upper_bound + 1)]
    return len(admission.plan([Card(need.uuid, size_bytes)], [], claims))
