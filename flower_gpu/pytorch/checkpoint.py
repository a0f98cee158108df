"""One file of model and optimizer, however many ranks have them."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flower_gpu import files
from flower_gpu.errors import ConfigError, RankError
from flower_gpu.pytorch import group, learning_rate

_KEYS = {"model", "optimizer", "steps", "extra"}


def save_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, **extra: Any
) -> None:
    """Write a checkpoint; rank 0 does, and the others wait for it.

    Parameters
    ----------
    path : str or os.PathLike
        The file; it appears under its name when it is complete, and replaces what is there.
    model : torch.nn.Module
        As from :func:`prepare_model`. The file does not depend on how many ranks there were, or how they
        worked together.
    optimizer : torch.optim.Optimizer, optional
        Its state is saved, too.
    **extra
        Numbers, strings and tensors that :func:`load_checkpoint` is to return, such as the epoch.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    steps = learning_rate.steps_of(optimizer)
    state, of_optimizer = get_state_dict(model, optimizer or (), options=options)
    # An optimizer that has no state yet was given one by a step that changes nothing.
    learning_rate.set_steps(optimizer, steps)
    problem = None
    if group.rank() == 0:
        try:
            _check(extra)
            _write(
                Path(path),
                {"model": state, "optimizer": of_optimizer, "steps": steps, "extra": extra},
            )
        except Exception as error:  # the others wait for the word of rank 0
            problem = error
    told = group.of_first(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    if told is not None:
        raise RankError(f"rank 0 could not write {path}: {told}", 0)


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None
) -> dict[str, Any] | None:
    """Load what :func:`save_checkpoint` has written, by however many ranks; all ranks call it.

    Returns
    -------
    dict or None
        What was saved with it by name; None where there is no such file, and nothing was changed.

    Raises
    ------
    ConfigError
        If the file is no such checkpoint.
    """
    path = Path(path)
    if not group.of_first(path.exists()):
        return None
    # Each rank for itself: they are on one host, and share the pages of the file.
    found = _read(path)
    if optimizer is not None and not found["optimizer"]:
        raise ConfigError(f"{path} was saved without an optimizer, and is loaded with one")
    try:
        _set_state(model, optimizer, found)
    except Exception as error:
        if group.is_of_others(error):
            raise
        raise ConfigError(
            f"{path} is not of this model and optimizer: {type(error).__name__}: {error}"
        ) from error
    learning_rate.set_steps(optimizer, found["steps"])
    extra: dict[str, Any] = found["extra"]
    return extra


def _set_state(model: nn.Module, optimizer: Optimizer | None, found: Mapping[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    # PyTorch loads no optimizer that keeps nothing, such as SGD without momentum.
    keeps = optimizer is not None and any(found["optimizer"]["state"].values())
    set_state_dict(
        model,
        optimizer if optimizer is not None and keeps else (),
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"] if keeps else {},
        options=StateDictOptions(full_state_dict=True),
    )
    if optimizer is None or keeps:
        return
    for own, saved in zip(optimizer.param_groups, found["optimizer"]["param_groups"], strict=True):
        own.update({name: value for name, value in saved.items() if name != "params"})


def _check(extra: Mapping[str, Any]) -> None:
    """Refuse what could be written, but not be read without running code from the file."""
    for name, value in extra.items():
        content = io.BytesIO()
        try:
            torch.save(value, content)
            content.seek(0)
            torch.load(content, weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"{name}, a {type(value).__name__}, cannot be in a checkpoint: numbers, strings, tensors, "
                "and lists and dicts of them can; make float(...) of a scalar of numpy"
            ) from error


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with files.replaced(path) as new:
        torch.save(content, new)


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
