"""Decides which GPUs a call may use, from the node's policy and the server's request.

The node has the last word. Its policy comes from its own settings, never from a message. The server sends
only ``use-gpu``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flower_gpu.errors import GPUUnavailableError
from flower_gpu.gpu import drivers
from flower_gpu.gpu.gpus import GPU


@dataclass(frozen=True)
class DevicePolicy:
    """The policy of a node for its GPUs."""

    # One of :data:`POLICIES`. ``never``: no GPU. ``offer``: a GPU if the server requests one. ``force``: a
    # GPU, regardless of the server. ``require``: like ``force``, but without a GPU the call fails
    gpu: str
    # Indices, UUIDs or prefixes of UUIDs of the GPUs. None for all GPUs that the process can see
    gpu_ids: tuple[int | str, ...] | None = None


@dataclass(frozen=True)
class Decision:
    """The devices of a call."""

    # GPUs on which the call may get a lease. If empty, the call runs on the CPU, and all GPUs are hidden from
    # it
    uuids: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # for the operator of the node
    # True if the warnings should be logged as errors, because no GPU was found for the policy ``force``
    is_serious: bool = False

    @property
    def on_gpu(self) -> bool:
        """True if the call uses a GPU."""
        return bool(self.uuids)


def decide(
    policy: DevicePolicy,
    use_gpu: bool | None,
    gpus: Sequence[GPU],
    problem: str | None = None,
    *,
    hidden: Sequence[GPU] = (),
) -> Decision:
    """Decide which GPUs a call may use. A pure function of its arguments.

    ``policy``: policy of the node.
    ``use_gpu``: request of the server. None means a GPU if possible, without a warning otherwise.
    ``gpus``: GPUs that the process can see, in the order of preference, from
    :meth:`flower_gpu.gpu.gpus.Inventory.visible`. GPUs with a problem are never used, only explained.
    ``problem``: why no GPUs were found (``Inventory.problem``), or why none can be used.
    ``hidden``: GPUs of the host that the process cannot see. They are never used, but a message says that a
    named GPU is hidden.
    Returns the usable GPUs, or the CPU. Indices are those of ``nvidia-smi``, independent of
    ``CUDA_VISIBLE_DEVICES``. The index of a card in MIG mode means all its MIG devices.
    Raises GPUUnavailableError if the policy is ``require`` and a named GPU cannot be used, or no GPU at all.
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
            f"this node's policy is {policy.gpu}: a GPU is used although the server does not request one"
        )
    if missing:
        instead = named or usable
        word = "the others that were named" if named else "all that there are"
        warnings.append(f"{'; '.join(missing)}; used instead: {word}, {_listed(instead)}")
    chosen = usable if policy.gpu_ids is None else named or usable
    return Decision(tuple(gpu.uuid for gpu in chosen), tuple(warnings))


_ON_CPU = "this call runs on the CPU although the server requests a GPU"


def _without_gpu(policy: DevicePolicy, use_gpu: bool | None, why: str) -> Decision:
    if policy.gpu == "force":
        line = f"this node's policy is force, but no GPU can be used, so this call runs on the CPU: {why}"
        return Decision(warnings=(line,), is_serious=True)
    if use_gpu:
        # A machine without a GPU has no problem.
        absent = drivers.of_host().absent
        no_driver = f"{absent[0].upper()}{absent[1:]}: calls run on the CPU"
        return Decision(warnings=(no_driver if why.startswith(absent) else f"{_ON_CPU}: {why}",))
    if policy.gpu_ids is not None:  # the operator who named a GPU expects one
        numbers = ", ".join(map(str, policy.gpu_ids))
        return Decision(warnings=(f"this call runs on the CPU although gpu-ids is {numbers}: {why}",))
    return Decision()


def _required_but(missing: Sequence[str], why_none: str, usable: Sequence[GPU]) -> str:
    available = f"usable here: {_listed(usable)}" if usable else why_none
    reasons = "; ".join([*missing, available])
    return (
        f"this node's policy is require, and the required GPU cannot be used: {reasons}. Nothing was run. "
        "See `flower-gpu gpus`; change gpu-ids, or use the policy force or offer, which continue without a "
        "GPU"
    )


def _look_up(
    numbers: tuple[int | str, ...] | None, gpus: Sequence[GPU], hidden: Sequence[GPU]
) -> tuple[tuple[GPU, ...], list[str]]:
    """Return the named usable GPUs, and for each other name the reason why it cannot be used."""
    named: dict[str, GPU] = {}
    missing = []
    for number in numbers or ():
        matches = _matching(number, [*gpus, *hidden])
        usable = {gpu.uuid: gpu for gpu in gpus if gpu.is_usable and _is_among(gpu, matches)}
        if usable and len(matches) == 1:
            named.update(usable)
        else:
            missing.append(_why_unusable(number, matches, gpus, hidden))
    return tuple(named.values()), missing


def _matching(number: int | str, gpus: Iterable[GPU]) -> set[int | str]:
    """Return the index if a GPU has it, or the UUIDs of the GPUs and cards that match a text."""
    if isinstance(number, int):
        return {gpu.index for gpu in gpus if gpu.index == number}
    uuids = {uuid for gpu in gpus for uuid in (gpu.uuid, gpu.mig_parent) if uuid}
    text = number.casefold()
    exact = {uuid for uuid in uuids if uuid.casefold() == text}
    return {*(exact or (uuid for uuid in uuids if uuid.casefold().startswith(text)))}


def _is_among(gpu: GPU, matches: set[int | str]) -> bool:
    """Return True if the GPU matches, or the card of the MIG device."""
    return not matches.isdisjoint({gpu.index, gpu.uuid, gpu.mig_parent})


def _why_unusable(
    number: int | str, matches: set[int | str], gpus: Sequence[GPU], hidden: Sequence[GPU]
) -> str:
    name = f"GPU {number}" if isinstance(number, int) else number
    if not matches:
        return f"there is no {name}"
    if len(matches) > 1:
        return f"{name} fits {len(matches)} GPUs ({', '.join(sorted(map(str, matches)))})"
    reasons = [gpu.problem for gpu in (*gpus, *hidden) if gpu.problem and _is_among(gpu, matches)]
    if reasons:
        return f"{name} cannot be used ({'; '.join(dict.fromkeys(reasons))})"
    if not any(_is_among(gpu, matches) for gpu in gpus):
        return f"{name} is hidden by {drivers.of_host().visible_variable}"
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
        return f"{drivers.of_host().visible_variable} hides every GPU of this node ({_listed(hidden)})"
    return "this node has no GPU"


def _listed(gpus: Sequence[GPU]) -> str:
    return ", ".join(f"{gpu.uuid if gpu.mig_parent else f'GPU {gpu.index}'} ({gpu.name})" for gpu in gpus)
