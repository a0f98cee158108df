"""What a node allows against what the server requests: which GPUs a call may use.

The node has the last word. Its policy is read from its own settings and never from a message; from the
server comes one answer only, ``use-gpu``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.errors import ConfigError, GPUUnavailableError
from flower_gpu.gpu.nvml import NO_DRIVER
from flower_gpu.options import CALL, POLICIES, find

if TYPE_CHECKING:
    from flower_gpu.gpu.gpus import GPU

#: Key of a node config: the GPUs that its policy is about.
NODE_IDS_KEY: Final = "gpu-ids"
#: Key of a fit config or run config: whether the server wants a GPU to be used.
SERVER_KEY: Final = "use-gpu"

_NUMBER = re.compile(r"[+-]?\d{1,9}", re.ASCII)
# As NVML writes them, or their beginning; older drivers name MIG devices MIG-GPU-<uuid>/<number>/<number>.
_UUID = re.compile(r"(?:GPU|MIG)-[\w./-]+", re.ASCII | re.IGNORECASE)

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def gpu_numbers(value: int | str | None, name: str = "gpu_ids") -> tuple[int | str, ...] | None:
    """Read which GPUs are meant.

    ``value``: a number as ``nvidia-smi`` shows it, the UUID of a GPU or MIG device or its beginning, or
    several of them in one text: ``"4,5"``, ``"0, GPU-8932f937"``.
    ``name``: where the value comes from, for the error message.
    Returns each once, in the order given; None for None. A negative number is kept: no GPU has it.
    Raises TypeError if it is neither a number nor a text. ``True`` and ``1.0`` are none.
    Raises ConfigError if an entry is empty, or neither a number nor a UUID.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(
            f'{name} must be a GPU number, a UUID, or a list of them as one text such as "4,5", not a value '
            f"of type {type(value).__name__}: {value!r}"
        )
    if isinstance(value, int):
        return (value,)
    found: dict[int | str, None] = {}
    for entry in (part.strip() for part in value.split(",")):
        if _NUMBER.fullmatch(entry):
            found[int(entry)] = None
        elif _UUID.fullmatch(entry):
            found[entry] = None
        else:
            raise ConfigError(
                f"{name}={value!r}: {entry!r} is neither a GPU number nor a UUID (GPU-... or MIG-..., see "
                "`nvidia-smi -L`)"
                if entry
                else f'{name}={value!r} has an empty entry; write numbers or UUIDs such as "0" or "4,5"'
            )
    return tuple(found)


@dataclass(frozen=True)
class DevicePolicy:
    """What a node allows.

    Raises TypeError if something has the wrong type.
    Raises ConfigError if ``gpu`` is no policy, or ``gpu_ids`` is empty.
    """

    # One of :data:`POLICIES`. ``never``: no GPU. ``offer``: if the server requests one. ``force``: whatever
    # the server says. ``require``: the same, and without a GPU the call fails.
    gpu: str = "offer"
    # The GPUs it is about, see :func:`gpu_numbers`. None: all that the process may see.
    gpu_ids: tuple[int | str, ...] | None = None

    def __post_init__(self) -> None:
        _check_word(self.gpu, "gpu")
        if self.gpu_ids is None:
            return
        if not isinstance(self.gpu_ids, tuple) or None in self.gpu_ids:
            raise TypeError(
                f"gpu_ids must be a tuple of GPU numbers and UUIDs, or None, not {self.gpu_ids!r}; "
                "gpu_numbers() makes one"
            )
        if not self.gpu_ids:
            raise ConfigError("gpu_ids names no GPU; leave it out for all of them")
        numbers = (number for entry in self.gpu_ids for number in gpu_numbers(entry) or ())
        object.__setattr__(self, "gpu_ids", tuple(dict.fromkeys(numbers)))

    @classmethod
    def resolve(
        cls,
        gpu: str | None = None,
        gpu_ids: int | str | None = None,
        node_config: Mapping[str, Any] = _NOTHING,
        environ: Mapping[str, str] = _NOTHING,
    ) -> DevicePolicy:
        """Put together what the operator of the node, the environment and the code say.

        ``gpu``: what the code says, one of :data:`POLICIES`.
        ``gpu_ids``: what the code says, see :func:`gpu_numbers`.
        ``node_config``: the SuperNode's ``--node-config``, with its keys ``gpu`` and ``gpu-ids``.
        ``environ``: the environment, with ``FLOWER_GPU_POLICY`` and ``FLOWER_GPU_IDS``. Empty is not set.
        Returns for each of both the first that says something of node config, environment and code; else
        ``offer``, and all GPUs. So a number alone is an offer.
        Raises TypeError if a value has the wrong type.
        Raises ConfigError if a value cannot be used; the message names where it came from. A value that
        another one hides is not looked at.
        """
        code = {"gpu": gpu, "gpu_ids": gpu_ids}
        word, source = find(["gpu"], code, environ, node_config).get("gpu", ("offer", "gpu"))
        _check_word(word, source)
        ids, source = find(["gpu_ids"], code, environ, node_config).get("gpu_ids", (None, "gpu_ids"))
        return cls(word, gpu_numbers(ids, source))


def _check_word(word: object, source: str) -> None:
    if not isinstance(word, str):
        raise TypeError(
            f"{source} must be one of the words {', '.join(POLICIES)}, not a value of type "
            f"{type(word).__name__}: {word!r}"
        )
    kind = CALL["gpu"].kind
    if kind is not None:
        kind.check(word, source)


def requested(fit_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> bool | None:
    """Return whether the server requests a GPU.

    ``fit_config``: the config of this call; it wins.
    ``run_config``: the config of the run.
    Returns the value of ``use-gpu``; None where neither has the key.
    Raises TypeError if the value is not a bool: ``"yes"``, ``"false"`` and 1 could mean anything.
    """
    for config, source in ((fit_config, "config of this call"), (run_config, "run config")):
        if SERVER_KEY in config:
            value = config[SERVER_KEY]
            if not isinstance(value, bool):
                raise TypeError(
                    f"{SERVER_KEY} in the {source} must be true or false, not a value of type "
                    f"{type(value).__name__}: {value!r}"
                )
            return value
    return None


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
    ``use_gpu``: what the server requests, see :func:`requested`. None means yes, but nobody insists.
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
    Raises TypeError if ``use_gpu`` is neither a bool nor None.
    """
    if use_gpu is not None and not isinstance(use_gpu, bool):
        raise TypeError(f"use_gpu must be True, False or None, not {use_gpu!r}")
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
        return Decision(warnings=(f"this call runs on the CPU though {NODE_IDS_KEY} is {numbers}: {why}",))
    return Decision()


def _required_but(missing: Sequence[str], why_none: str, usable: Sequence[GPU]) -> str:
    there = f"usable here: {_listed(usable)}" if usable else why_none
    reasons = "; ".join([*missing, there])
    return (
        f"this node's policy is require, and what it requires cannot be used: {reasons}. Nothing was run. "
        "See `flower-gpu gpus`; change gpu-ids, or use the policy force or offer, which go on without"
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
