"""The GPUs that a call may use, by the node's policy and the server's request.

The node has the last word. Its policy is read from its own settings and never from a message; from the
server comes one answer only, ``use-gpu``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flower_gpu.errors import GPUUnavailableError
from flower_gpu.gpu.nvml import NO_DRIVER

if TYPE_CHECKING:
    from flower_gpu.gpu.gpus import GPU


@dataclass(frozen=True)
class DevicePolicy:
    """What a node allows."""

    # One of :data:`POLICIES`. ``never``: no GPU. ``offer``: if the server requests one. ``force``: whatever
    # the server says. ``require``: the same, and without a GPU the call fails.
    gpu: str
    # The GPUs it is about: numbers, and UUIDs or their beginnings. None: all that the process may see.
    gpu_ids: tuple[int | str, ...] | None = None


@dataclass(frozen=True)
class Decision:
    """Where a call may run."""

    # GPUs it may get a lease on. Empty: it runs on the CPU, and every GPU is hidden from it.
    uuids: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # what the operator of the node should read
    # Whether ``warnings`` are to be logged as errors: a GPU was forced, and there is none
    is_serious: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is used."""
        return bool(self.uuids)


def decide(
    policy: DevicePolicy,
    use_gpu: bool | None,
    gpus: Sequence[GPU],
    problem: str | None = None,
    *,
    hidden: Sequence[GPU] = (),
) -> Decision:
    """Decide which GPUs a call may use. Pure: the same arguments, the same decision.

    ``policy``: what the node allows.
    ``use_gpu``: what the server requests. None means yes, but nobody insists.
    ``gpus``: what the process may see, as :meth:`flower_gpu.gpu.gpus.Inventory.visible` has it, in the order
    of preference. GPUs with a problem may be among them: they are never used, only explained.
    ``problem``: why there is no list of GPUs, if there is none (``Inventory.problem``), or why none can be
    used.
    ``hidden``: GPUs of the host that the process may not see. They are never used; one that is named by its
    number is said to be hidden, instead of missing.
    Returns the usable GPUs, or the CPU. A GPU's number is that of ``nvidia-smi``, whatever
    ``CUDA_VISIBLE_DEVICES`` makes of it. That of a card in MIG mode means all its MIG devices.
    Raises GPUUnavailableError if the policy is ``require`` and a GPU it names, or without a name any GPU,
    cannot be used.
    """
    if policy.gpu == "never":
        return Decision(warnings=(f"{_ON_CPU}: this node's policy is never",) if use_gpu else ())
    if policy.gpu == "offer" and use_gpu is False:
        return Decision()
    usable = tuple(gpu for gpu in gpus if gpu.is_usable)
    named, missing = _look_up(policy.gpu_ids, gpus, hidden)
    if policy.gpu == "require" and (missing or not usable):
        raise GPUUnavailableError(_required_but(missing, _no_gpu(gpus, problem, hidden), usable))
    if not usable:
        return _without_gpu(policy, use_gpu, _no_gpu(gpus, problem, hidden))
    warnings = []
    if use_gpu is False:
        warnings.append(
            f"this node's policy is {policy.gpu}: a GPU is used though the server does not want one"
        )
    if missing:
        instead = named or usable
        word = "the others that were named" if named else "all that there are"
        warnings.append(f"{'; '.join(missing)}; used instead: {word}, {_listed(instead)}")
    chosen = usable if policy.gpu_ids is None else named or usable
    return Decision(tuple(gpu.uuid for gpu in chosen), tuple(warnings))


_ON_CPU = "this call runs on the CPU though the server requests a GPU"


def _without_gpu(policy: DevicePolicy, use_gpu: bool | None, why: str) -> Decision:
    if policy.gpu == "force":
        line = f"this node's policy is force, but no GPU can be used, so this call runs on the CPU: {why}"
        return Decision(warnings=(line,), is_serious=True)
    if use_gpu:
        # Nothing is wrong on a machine that has no GPU.
        no_driver = f"{NO_DRIVER[0].upper()}{NO_DRIVER[1:]}: calls run on the CPU"
        return Decision(warnings=(no_driver if why.startswith(NO_DRIVER) else f"{_ON_CPU}: {why}",))
    if policy.gpu_ids is not None:  # whoever wrote a number believes that there is a GPU
        numbers = ", ".join(map(str, policy.gpu_ids))
        return Decision(warnings=(f"this call runs on the CPU though gpu-ids is {numbers}: {why}",))
    return Decision()


def _required_but(missing: Sequence[str], why_none: str, usable: Sequence[GPU]) -> str:
    there = f"usable here: {_listed(usable)}" if usable else why_none
    reasons = "; ".join([*missing, there])
    return (
        f"this node's policy is require, and the required GPU cannot be used: {reasons}. Nothing was run. "
        "See `flower-gpu gpus`; change gpu-ids, or use the policy force or offer, which go on without a GPU"
    )


def _look_up(
    numbers: tuple[int | str, ...] | None, gpus: Sequence[GPU], hidden: Sequence[GPU]
) -> tuple[tuple[GPU, ...], list[str]]:
    """Return the usable GPUs that are named, and for each other name why it cannot be used."""
    found: dict[str, GPU] = {}
    missing = []
    for number in numbers or ():
        meant = _meant(number, [*gpus, *hidden])
        usable = {gpu.uuid: gpu for gpu in gpus if gpu.is_usable and _is(gpu, meant)}
        if usable and len(meant) == 1:
            found.update(usable)
        else:
            missing.append(_why_not(number, meant, gpus, hidden))
    return tuple(found.values()), missing


def _meant(number: int | str, gpus: Iterable[GPU]) -> set[int | str]:
    """Return the number, or the UUIDs that a text stands for, as far as there are such GPUs."""
    if isinstance(number, int):
        return {gpu.index for gpu in gpus if gpu.index == number}
    uuids = {uuid for gpu in gpus for uuid in (gpu.uuid, gpu.mig_parent) if uuid}
    text = number.casefold()
    exact = {uuid for uuid in uuids if uuid.casefold() == text}
    return {*(exact or (uuid for uuid in uuids if uuid.casefold().startswith(text)))}


def _is(gpu: GPU, meant: set[int | str]) -> bool:
    """Tell whether a GPU is meant, itself or as a MIG device of a card that is."""
    return not meant.isdisjoint({gpu.index, gpu.uuid, gpu.mig_parent})


def _why_not(number: int | str, meant: set[int | str], gpus: Sequence[GPU], hidden: Sequence[GPU]) -> str:
    name = f"GPU {number}" if isinstance(number, int) else number
    if not meant:
        return f"there is no {name}"
    if len(meant) > 1:
        return f"{name} fits {len(meant)} GPUs ({', '.join(sorted(map(str, meant)))})"
    reasons = [gpu.problem for gpu in (*gpus, *hidden) if gpu.problem and _is(gpu, meant)]
    if reasons:
        return f"{name} cannot be used ({'; '.join(dict.fromkeys(reasons))})"
    if not any(_is(gpu, meant) for gpu in gpus):
        return f"{name} is hidden by CUDA_VISIBLE_DEVICES"
    return f"{name} cannot be used (its memory is not known)"


def _no_gpu(gpus: Sequence[GPU], problem: str | None, hidden: Sequence[GPU]) -> str:
    broken = [
        f"GPU {gpu.index}: {gpu.problem or 'its memory is not known'}" for gpu in gpus if not gpu.is_usable
    ]
    if problem:
        return problem
    if broken:
        return f"no GPU of this node can be used ({'; '.join(broken)})"
    if hidden:
        return f"CUDA_VISIBLE_DEVICES hides every GPU of this node ({_listed(hidden)})"
    return "this node has no GPU"


def _listed(gpus: Sequence[GPU]) -> str:
    return ", ".join(f"{gpu.uuid if gpu.mig_parent else f'GPU {gpu.index}'} ({gpu.name})" for gpu in gpus)
