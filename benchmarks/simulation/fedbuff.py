"""Part ``fedbuff``: clients that are 1 to 8 times as slow, with FedBuff and with FedAvg."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared import table
from benchmarks.shared.driver import Figures, Options, Rows, medians
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Result, Run, perform

#: Clients, clients per round, clients that train at a time with FedBuff, and workers.
_SIZE, _QUICK_SIZE = (32, 8, 28, 24), (4, 2, 3, 2)
#: Rounds of FedAvg and of FedBuff, local epochs, and the accuracy to reach, by data set.
_DATA_SETS = {"digits": (8, 20, 10, 0.85), "cifar10": (10, 16, 4, 0.25)}
_QUICK = (1, 2, 1, 0.0)
_SEEDS, _QUICK_SEEDS = (0, 1, 2), (0,)

_NETWORKS = {"digits": "digits-cnn", "cifar10": "cifar-cnn"}
_STRATEGIES = ("fedavg", "fedbuff")
_SLOWEST = 8
_TEST_IMAGES, _TRAINING_IMAGES = 500, 2400
_FIGURES = ("busy", "busy_from_start", "cpu", "to_accuracy_s", "round_s", "accuracy")


def measure(options: Options, figures: Figures) -> None:
    """Add a row per data set, seed and strategy, and rows with medians over the seeds."""
    figures["fedbuff"] = []
    with tempfile.TemporaryDirectory(prefix="fgpu-fedbuff-") as name:
        folder = Path(name)
        for data in _DATA_SETS:
            if data == "cifar10":
                if options.data is None:
                    print(f"\n{data} is left out: --data names no file", file=sys.stderr)
                    continue
                np.savez(folder / "images.npz", **_images(options.data))
            figures["fedbuff"] += _measure(data, folder, is_quick=options.quick)


def _measure(data: str, folder: Path, *, is_quick: bool) -> Rows:
    size, seeds = (_QUICK_SIZE, _QUICK_SEEDS) if is_quick else (_SIZE, _SEEDS)
    clients, per_round, concurrency, workers = size
    *rounds, epochs, wanted = _QUICK if is_quick else _DATA_SETS[data]
    (folder / "devices.toml").write_text(
        "\n".join(
            f'["{number}-{clients - 1}/{_SLOWEST}"]\nslow-down = {number + 1}\n'
            for number in range(min(_SLOWEST, clients))
        )
    )
    options = ["--clients-table", str(folder / "devices.toml"), "--max-workers", str(workers)]
    config: dict[str, Any] = {
        "clients-per-round": per_round,
        "concurrency": concurrency,
        "local-epochs": epochs,
    }
    images = "" if data == "digits" else str(folder / "images.npz")
    config |= {"data": images, "network": _NETWORKS[data], "is-evaluated": True, "batch": 16}
    rows: Rows = []
    for seed in seeds:
        for strategy, count in zip(_STRATEGIES, rounds, strict=True):
            kind = {"strategy": "fedbuff" if strategy == "fedbuff" else "ours"}
            run_config = {**config, **kind, "num-server-rounds": count, "seed": seed}
            result = perform(Run("ours", "digits", clients, run_config, options=options), is_sampled=False)
            setting = {"data": data, "strategy": strategy, "clients": clients, "clients_per_round": per_round}
            setting |= {"workers": workers, "rounds": count, "local_epochs": epochs, "wanted": wanted}
            training = min(workers, per_round if strategy == "fedavg" else concurrency)
            rows.append({**setting, "seed": seed, **_figures(result, wanted, training)})
    for strategy in _STRATEGIES:
        of_strategy = [row for row in rows if row["strategy"] == strategy]
        middle = medians([{name: row[name] for name in _FIGURES} for row in of_strategy])
        rows.append({**of_strategy[0], "seed": None, **middle})
    title = f"{data}, {clients} clients, 1 to {_SLOWEST} times as slow, {workers} workers"
    table.show(f"{title}; rows without a seed have the medians", rows, f"strategy seed {' '.join(_FIGURES)}")
    return rows


def _figures(result: Result, wanted: float, training: int) -> dict[str, float]:
    """Return how busy the cores were, and when the model had the wanted accuracy.

    Parameters
    ----------
    result : Result
        The run.
    wanted : float
        The wanted accuracy.
    training : int
        Number of clients that train at a time. ``busy`` starts when this many clients have begun, and
        ``busy_from_start`` starts with the first client.
    """
    versions_s, accuracies = result.figures["versions_s"], result.figures["accuracies"]
    reached_s = [at for at, accuracy in zip(versions_s, accuracies, strict=True) if accuracy >= wanted]
    if not reached_s:
        raise BenchmarkError(f"fedbuff: no version has an accuracy of {wanted:.0%}: {accuracies}")
    calls = [call for call in result.calls if call["task"] == "train" and call["task_at"] is not None]
    end = result.figures["began"] + versions_s[-1]
    # A client that sleeps for its slow-down uses no core. Some still train when the last version is made.
    spans = [(call["task_at"], call["sleeps_at"] or call["result_at"] or end) for call in calls]
    begins = sorted(begin for begin, _ in spans)
    cores = len(os.sched_getaffinity(0))
    return {
        "busy": round(_busy(spans, begins[training - 1], end), 3),
        "busy_from_start": round(_busy(spans, begins[0], end), 3),
        "cpu": round(sum(call["cpu_s"] or 0.0 for call in calls) / (end - begins[0]) / cores, 3),
        "to_accuracy_s": round(reached_s[0], 2),
        "round_s": round(median(after - before for before, after in pairwise([0.0, *versions_s])), 2),
        "accuracy": round(accuracies[-1], 4),
    }


def _busy(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return the mean share of the cores on which a client computes."""
    cores = len(os.sched_getaffinity(0))
    changes = [(begin, 0), *((at, 1) for at, _ in spans), *((at, -1) for _, at in spans), (end, 0)]
    total_s, computing = 0.0, 0
    for (at, change), (after, _) in pairwise(sorted((min(max(at, begin), end), by) for at, by in changes)):
        computing += change
        total_s += min(computing, cores) * (after - at)
    return total_s / (end - begin) / cores


def _images(file: Path) -> dict[str, Any]:
    from PIL import Image

    count = _TEST_IMAGES + _TRAINING_IMAGES
    with np.load(file) as arrays:
        jpeg, offsets = arrays["jpeg"].tobytes(), arrays["offsets"][: count + 1]
        labels = arrays["labels"][:count]
    pictures = [Image.open(io.BytesIO(jpeg[begin:end])).convert("RGB") for begin, end in pairwise(offsets)]
    pixels = np.stack([np.asarray(picture) for picture in pictures]).transpose(0, 3, 1, 2)
    pixels, labels = (pixels / 127.5 - 1).astype(np.float32), labels.astype(np.int64)
    return {
        "images": pixels[_TEST_IMAGES:],
        "labels": labels[_TEST_IMAGES:],
        "test_images": pixels[:_TEST_IMAGES],
        "test_labels": labels[:_TEST_IMAGES],
    }
