"""One file of model and optimizer, however many ranks have them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flower_gpu.errors import ConfigError
from flower_gpu.pytorch import group

_KEYS = {"model", "optimizer", "extra"}


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None, extra: Mapping[str, Any]
) -> None:
    """Write a checkpoint; see ``save_checkpoint``."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, of_optimizer = get_state_dict(model, optimizer or (), options=options)
    problem = None
    if group.rank() == 0:
        try:
            _write(Path(path), {"model": state, "optimizer": of_optimizer, "extra": dict(extra)})
        except Exception as error:  # the others wait for the word of rank 0
            problem = error
    told = group.of_first(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    if told is not None:
        raise ConfigError(f"rank 0 could not write {path}: {told}")


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None
) -> dict[str, Any] | None:
    """Load a checkpoint; see ``load_checkpoint``."""
    path = Path(path)
    if not group.of_first(path.exists()):
        return None
    # Each rank for itself: they are on one host, and share the pages of the file.
    found = _read(path)
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    set_state_dict(
        model,
        optimizer or (),
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"] if optimizer is not None else {},
        options=StateDictOptions(full_state_dict=True),
    )
    extra: dict[str, Any] = found["extra"]
    return extra


def _write(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        torch.save(content, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> Any:
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # a file that is none makes it raise nearly anything
        raise ConfigError(
            f"{path} cannot be read as a checkpoint: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(content, dict) and set(content) == _KEYS):
        raise ConfigError(f"{path} is not a checkpoint of flower_gpu.pytorch.distributed.save_checkpoint")
    return content
