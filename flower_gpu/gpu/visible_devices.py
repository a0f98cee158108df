"""What ``CUDA_VISIBLE_DEVICES`` leaves to a process."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flower_gpu.gpu.inventory import GPU, Inventory


def visible(inventory: Inventory, cuda_visible_devices: str | None) -> tuple[GPU, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to a process, in its order, broken ones too.

    The rules are CUDA's, as PyTorch follows them when it counts devices without starting CUDA: numbers, or
    UUIDs of GPUs or the beginnings of such, or UUIDs of MIG devices, not mixed; all up to the first that does
    not exist; none if one is named twice. Two things are different. Numbers are those of ``nvidia-smi``, as
    with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. And a card in MIG mode stands for all its MIG devices, of which
    CUDA shows a process only one: each worker gets one of them.

    ``inventory``: the host's GPUs.
    ``cuda_visible_devices``: the variable's value; None: it is not set, and all are visible. ``""``: none
    are.
    """
    cards = tuple(gpu for gpu in inventory.gpus if gpu.mig_parent is None)
    if cuda_visible_devices is None:
        return tuple(gpu for card in cards for gpu in _devices(inventory, card))
    named: list[GPU] = []
    for entry in _entries(cuda_visible_devices):
        if isinstance(entry, int):
            found = next((card for card in cards if card.index == entry), None)
        elif entry.startswith("MIG-"):
            found = next((gpu for gpu in inventory.gpus if gpu.mig_parent and gpu.uuid == entry), None)
        else:
            found = with_uuid(cards, entry)
        if found is None:
            break
        if found in named:
            return ()
        named.append(found)
    return tuple(gpu for found in named for gpu in _devices(inventory, found))


def _entries(text: str) -> list[int] | list[str]:
    """Split the variable's value; the first entry decides what all of them are."""
    parts = text.split(",")
    for prefix in ("GPU-", "MIG-"):
        if text.startswith(prefix):
            same = [part.startswith(prefix) for part in parts]
            parts = parts[: same.index(False)] if False in same else parts
            return [] if len(set(parts)) < len(parts) else parts
    numbers: list[int] = []
    for part in parts:
        found = re.match(r"[+-]?[0-9]+", part.strip())  # as C's strtol: what follows a number is ignored
        number = int(found[0]) if found and len(found[0]) < 10 else -1
        if number < 0:
            break
        if number in numbers:
            return []
        numbers.append(number)
    return numbers


def with_uuid(gpus: tuple[GPU, ...], text: str) -> GPU | None:
    """Return the GPU with this UUID, or the only one whose UUID begins so."""
    if not text.startswith(("GPU-", "MIG-")):
        return None
    for gpu in gpus:
        if gpu.uuid == text:
            return gpu
    found = [gpu for gpu in gpus if gpu.uuid.startswith(text)]
    return found[0] if len(found) == 1 else None


def _devices(inventory: Inventory, gpu: GPU) -> tuple[GPU, ...]:
    """Return what a program can use of a GPU: itself, or the MIG devices of a card in MIG mode."""
    on_it = tuple(
        other for other in inventory.gpus if other.mig_parent is not None and other.mig_parent == gpu.uuid
    )
    return on_it or (gpu,)
