"""Loss and classification metrics of a model over a data loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DistributedSampler

from flower_gpu.errors import ConfigError
from flower_gpu.pytorch.device import device as worker_device
from flower_gpu.pytorch.distributed import summed_tensor


def classification_metrics(
    model: nn.Module,
    loader: Iterable[Any],
    device: torch.device | str | None = None,
    *,
    input_key: str = "img",
    label_key: str = "label",
) -> dict[str, float | int]:
    """Evaluate a classifier over all examples of a loader.

    Nothing is copied from the GPU until the last batch is through.

    Parameters
    ----------
    model : torch.nn.Module
        Maps a batch of inputs to logits of shape (examples, classes). It is moved to ``device`` and
        stays there; the training mode of each of its modules is restored.
    loader : iterable
        Batches: pairs ``(inputs, labels)``, or mappings with the two keys below. Labels are
        integers of shape (examples,).
    device : torch.device or str, optional
        Where to compute. Default: :func:`flower_gpu.pytorch.device.device`.
    input_key, label_key : str
        Keys of the inputs and labels in batches that are mappings.

    Returns
    -------
    dict
        ``loss`` (cross-entropy, mean over examples), ``accuracy``, ``precision``, ``recall``,
        ``f1`` and ``num_examples``. The last three metrics are means over the classes that occur
        among labels or predictions (macro); a class that is never predicted has precision 0, one
        without labels has recall 0, as in scikit-learn with ``zero_division=0``.

    Raises
    ------
    ConfigError
        If the loader is empty, or if batches or outputs are not of the kinds above.
    """
    device = worker_device() if device is None else torch.device(device)
    modes = [(module, module.training) for module in model.modules()]
    model.to(device)
    model.eval()
    try:
        with torch.inference_mode():
            num_examples, sums, counts = _count(model, loader, device, (input_key, label_key))
    finally:
        for module, training in modes:
            module.training = training
    loss_sum, invalid = sums
    if invalid:
        raise ConfigError(
            f"{int(invalid)} of {num_examples} labels are not classes of the model, which are "
            f"0 to {counts.shape[1] - 1}"
        )
    labels, predictions, hits = counts
    present = (labels + predictions) > 0
    labels, predictions, hits = labels[present], predictions[present], hits[present]
    # A class without labels or predictions has no hits either: 0 / 1 there instead of 0 / 0.
    return {
        "loss": float(loss_sum / num_examples),
        "accuracy": float(hits.sum() / num_examples),
        "precision": float((hits / np.maximum(predictions, 1)).mean()),
        "recall": float((hits / np.maximum(labels, 1)).mean()),
        "f1": float((2 * hits / (labels + predictions)).mean()),
        "num_examples": num_examples,
    }


def _count(
    model: nn.Module, loader: Iterable[Any], device: torch.device, keys: tuple[str, str]
) -> tuple[int, Any, Any]:
    """Return the number of examples, (sum of losses, invalid labels), and counts per class.

    The counts have shape (3, classes): labels, predictions, and hits. The metrics need no more of
    the confusion matrix, which for many classes would be large.
    """
    num_examples = 0
    left = _own_examples(loader)
    counts: torch.Tensor | None = None
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in loader:
        inputs, labels = (_move(part, device) for part in _pair(batch, keys))
        logits = model(inputs)
        _check(logits, labels, counts)
        if left is not None:  # the rest are there so that all ranks have as many
            logits, labels = logits[:left], labels[:left]
            left -= len(labels)
        num_classes = logits.shape[1]
        if counts is None:
            counts = torch.zeros(3, num_classes, dtype=torch.int64, device=device)
        # A label out of range would end a CUDA process with an assertion; looking at the labels
        # here would wait for the GPU in every batch. So they are counted, and told at the end.
        labels = labels.long()
        valid = (labels >= 0) & (labels < num_classes)
        labels = labels.where(valid, 0)
        predictions = logits.argmax(dim=1)
        at_least_float32 = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = functional.cross_entropy(at_least_float32, labels, reduction="none")
        sums += torch.stack([losses.sum(dtype=torch.float64), (~valid).sum().double()])
        ones = torch.ones_like(labels)
        counts[0].index_add_(0, labels, ones)
        counts[1].index_add_(0, predictions, ones)
        counts[2].index_add_(0, labels, (predictions == labels).long())
        num_examples += len(labels)
    if counts is None or (num_examples == 0 and left is None):
        raise ConfigError("the loader gave no examples, so there is nothing to evaluate")
    # One transfer: counts are exact as float64 up to 2**53.
    examples = torch.full((1,), num_examples, dtype=torch.float64, device=device)
    figures = torch.cat([examples, sums, counts.flatten().double()])
    if left is not None:
        figures = summed_tensor(figures)
    values = figures.cpu().numpy()
    return int(values[0]), values[1:3], values[3:].reshape(3, -1)


def _own_examples(loader: Any) -> int | None:
    """Return how many examples of a loader with a ``DistributedSampler`` count for its rank; else None.

    The sampler repeats some, so that all ranks have as many; these come last.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return None
    whole = min(len(cast(Sized, sampler.dataset)), sampler.total_size)
    return len(range(sampler.rank, whole, sampler.num_replicas))


def _pair(batch: Any, keys: tuple[str, str]) -> tuple[Any, Any]:
    """Return inputs and labels of a batch."""
    if isinstance(batch, Mapping):
        missing = [key for key in keys if key not in batch]
        if missing:
            raise ConfigError(
                f"the batch has the keys {', '.join(map(str, batch))}, but not "
                f"{' and '.join(missing)}; name them by input_key and label_key"
            )
        return batch[keys[0]], batch[keys[1]]
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        what = f"{len(batch)} parts" if isinstance(batch, list | tuple) else type(batch).__name__
        raise ConfigError(f"expected batches of two parts, inputs and labels, got {what}")
    return batch[0], batch[1]


def _move(part: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(part, torch.Tensor):
        raise ConfigError(f"expected inputs and labels as tensors, got {type(part).__name__}")
    return part.to(device, non_blocking=True)


def _check(logits: Any, labels: torch.Tensor, counts: torch.Tensor | None) -> None:
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ConfigError(f"expected logits of shape (examples, classes), two classes or more, got {got}")
    if counts is not None and counts.shape[1] != logits.shape[1]:
        raise ConfigError(
            f"the model gave {counts.shape[1]} classes for one batch and {logits.shape[1]} for another"
        )
    if labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise ConfigError(
            f"expected integer labels of shape ({len(logits)},), got shape {tuple(labels.shape)} "
            f"{labels.dtype}"
        )
