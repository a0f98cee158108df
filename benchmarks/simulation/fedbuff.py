"""Part ``fedbuff``: clients that are 1 to 8 times as slow, with FedBuff and with FedAvg."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError
from benchmarks.simulation.engines import Done, Run, perform

#: Clients, those of a round, those that train at a time with FedBuff, and workers.
SIZE, QUICK_SIZE = (32, 8, 28, 24), (4, 2, 3, 2)
#: By data: rounds of FedAvg and of FedBuff, local epochs, and the accuracy that is wanted.
DATA: Mapping[str, tuple[int, int, int, float]] = {"digits": (8, 20, 10, 0.85), "cifar10": (10, 16, 4, 0.25)}
_QUICK: tuple[int, int, int, float] = (1, 2, 1, 0.0)
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)

_KINDS = ("fedavg", "fedbuff")
_SLOWEST = 8  # times
_DIGITS_OF_TEST, _OF_TEST, _OF_CLIENTS = 360, 500, 2400
_FIGURES = ("busy", "busy_from_start", "cpu", "to_accuracy_s", "round_s", "accuracy")


def measure(
    size: tuple[int, int, int, int], seeds: Sequence[int], file: Path | None, *, is_quick: bool
) -> list[dict[str, Any]]:
    """Return a row for each data, seed and strategy, and rows with medians over the seeds.

    ``file``: CIFAR-10's images, as benchmarks.gpu takes them; without it there are only the digits.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fgpu-fedbuff-") as name:
        folder = Path(name)
        for data, values in DATA.items():
            if data == "digits":
                images = _digits()
            elif file is not None:
                images = _of_file(file)
            else:
                print(f"\n{data} is left out: --data names no file", file=sys.stderr)
                continue
            np.savez(folder / "images.npz", **images)
            rows += _measure(data, folder, size, _QUICK if is_quick else values, seeds)
    return rows


def _measure(
    data: str,
    folder: Path,
    size: tuple[int, int, int, int],
    values: tuple[int, int, int, float],
    seeds: Sequence[int],
) -> list[dict[str, Any]]:
    clients, each, concurrency, workers = size
    *rounds, epochs, wanted = values
    (folder / "devices.toml").write_text(
        "\n".join(
            f'["{number}-{clients - 1}/{_SLOWEST}"]\nslow-down = {number + 1}\n'
            for number in range(min(_SLOWEST, clients))
        )
    )
    options = ["--clients-table", str(folder / "devices.toml"), "--max-workers", str(workers)]
    rows = []
    for seed in seeds:
        for kind, count in zip(_KINDS, rounds, strict=True):
            config = {
                "kind": kind,
                "num-server-rounds": count,
                "clients-per-round": each,
                "concurrency": concurrency,
                "local-epochs": epochs,
                "data": str(folder / "images.npz"),
                "seed": seed,
            }
            done = perform(Run("ours", "buffered", clients, config, options=options), is_watched=False)
            setting = {"data": data, "strategy": kind, "clients": clients, "clients_per_round": each}
            setting |= {"workers": workers, "rounds": count, "local_epochs": epochs, "wanted": wanted}
            at_once = min(workers, each if kind == "fedavg" else concurrency)
            rows.append({**setting, "seed": seed, **_figures(done, wanted, at_once)})
    for kind in _KINDS:
        of_kind = [row for row in rows if row["strategy"] == kind]
        medians = {name: round(median(row[name] for row in of_kind), 3) for name in _FIGURES}
        rows.append({**of_kind[0], "seed": None, **medians})
    _show(rows)
    return rows


def _figures(done: Done, wanted: float, at_once: int) -> dict[str, float]:
    """Return how busy the cores were, and how long the model took to be as good as is wanted.

    ``busy``: how many cores had a client to compute, by the trace, of all cores, from when so many clients
    have begun as train at a time: before that, workers start. ``busy_from_start``: the same from the first
    client on. ``cpu``: how much of that time clients got. The difference is what other work took.
    """
    made_s, accuracies = done.figures["rounds_s"], done.figures["accuracies"]
    good = [at for at, accuracy in zip(made_s, accuracies, strict=True) if accuracy >= wanted]
    if not good:
        raise BenchmarkError(f"fedbuff: no version is right for {wanted:.0%}: {accuracies}")
    calls = [call for call in done.calls if call["task"] == "train" and call["task_at"] is not None]
    end = done.figures["began"] + made_s[-1]
    # While it sleeps for its slow-down, a client takes no core. Some train when the last version is there.
    spans = [(call["task_at"], call["sleeps_at"] or call["result_at"] or end) for call in calls]
    begins = sorted(begin for begin, _ in spans)
    cores = len(os.sched_getaffinity(0))
    return {
        "busy": round(_busy(spans, begins[at_once - 1], end), 3),
        "busy_from_start": round(_busy(spans, begins[0], end), 3),
        "cpu": round(sum(call["cpu_s"] or 0.0 for call in calls) / (end - begins[0]) / cores, 3),
        "to_accuracy_s": round(good[0], 2),
        "round_s": round(median(after - before for before, after in pairwise([0.0, *made_s])), 2),
        "accuracy": round(accuracies[-1], 4),
    }


def _busy(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return how many clients compute in the mean of a time, at most one for each core, of all cores."""
    cores = len(os.sched_getaffinity(0))
    changes = [(begin, 0), *((at, 1) for at, _ in spans), *((at, -1) for _, at in spans), (end, 0)]
    total_s, computing = 0.0, 0
    for (at, change), (after, _) in pairwise(sorted((min(max(at, begin), end), by) for at, by in changes)):
        computing += change
        total_s += min(computing, cores) * (after - at)
    return total_s / (end - begin) / cores


def _digits() -> dict[str, Any]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    pixels = (images[order] / 16).reshape(-1, 1, 8, 8).astype(np.float32)
    return _split(pixels, labels[order], _DIGITS_OF_TEST)


def _of_file(file: Path) -> dict[str, Any]:
    from PIL import Image

    count = _OF_TEST + _OF_CLIENTS
    with np.load(file) as found:
        jpeg, offsets, labels = (
            found["jpeg"].tobytes(),
            found["offsets"][: count + 1],
            found["labels"][:count],
        )
    pictures = [Image.open(io.BytesIO(jpeg[begin:end])).convert("RGB") for begin, end in pairwise(offsets)]
    pixels = np.stack([np.asarray(picture) for picture in pictures]).transpose(0, 3, 1, 2)
    return _split((pixels / 127.5 - 1).astype(np.float32), labels.astype(np.int64), _OF_TEST)


def _split(images: Any, labels: Any, of_test: int) -> dict[str, Any]:
    return {
        "images": images[of_test:],
        "labels": labels[of_test:],
        "test_images": images[:of_test],
        "test_labels": labels[:of_test],
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    first = rows[0]
    table.show(
        f"{first['data']}, {first['clients']} clients, 1x to {_SLOWEST}x slow, {first['workers']} workers",
        (
            "strategy",
            "seed",
            "cores busy",
            "from start",
            "CPU",
            f"to {first['wanted']:.0%}",
            "a round",
            "at the end",
        ),
        [
            (
                row["strategy"],
                "median" if row["seed"] is None else str(row["seed"]),
                f"{row['busy']:.0%}",
                f"{row['busy_from_start']:.0%}",
                f"{row['cpu']:.0%}",
                f"{row['to_accuracy_s']:.1f} s",
                f"{row['round_s']:.2f} s",
                f"{row['accuracy']:.3f}",
            )
            for row in rows
        ],
    )
