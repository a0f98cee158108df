"""Part ``throughput``: rounds per minute of ResNet-18, with 1, 2, 4 and 8 clients at a time.

In a round, every client trains from the same weights. The mean of the results is the next weights. Ours asks
for ``num_gpus=1/n`` and sends all requests at once. The article's clients all stay on the GPU, and n of them
are busy at a time.
"""

from __future__ import annotations

import math
import pickle
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.clients import Client, TimeLimitError, ask_all, checked, clients
from benchmarks.gpu.setting import Setting, prepare_images
from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError

LIMIT_S = 480.0

#: Seconds of rounds by way and concurrency.
Seconds = dict[tuple[str, int], list[float]]


def measure(setting: Setting) -> dict[str, Any]:
    images = prepare_images(setting)
    sizes = setting.sizes
    seconds: Seconds = {}
    runs, article = 0, ""
    with clients("ours", sizes.round_clients) as ours:
        setting.make_initial_weights(ours[0])
        try:
            # A warm-up, which starts the fork server.
            _round(setting, ours, max(sizes.concurrency), 0)
            for number in range(1, sizes.runs + 1):
                for concurrency in sizes.concurrency:
                    round_s = _round(setting, ours, concurrency, number)
                    seconds.setdefault(("ours", concurrency), []).append(round_s)
                article = article or _article_rounds(setting, number, seconds)
                runs += 1
        except TimeLimitError as error:
            print(f"throughput: {error}; the earlier figures count", flush=True)
    return {
        "model": setting.model,
        "images": images,
        "clients": sizes.round_clients,
        "batch": sizes.batch,
        "steps": sizes.steps,
        "complete_runs": runs,
        "article": article or "fits",
        "retries": sum(event["event"] == "out_of_memory" for event in setting.trace()),
        "rows": [_row(seconds, *key) for key in seconds],
    }


def _article_rounds(setting: Setting, number: int, seconds: Seconds) -> str:
    """Measure the article's rounds of one run. If its clients do not fit on the GPU, return the reason.

    These clients exit after the run, because the memory that they hold would be missing for ours.
    """
    with clients("article", setting.sizes.round_clients) as started:
        # Starting CUDA and building the models is not part of a round.
        work = [(client, _request(setting, client, 1, 0)) for client in started]
        replies = ask_all(work, setting.deadline, concurrency=max(setting.sizes.concurrency))
        if full := sum(bool(reply.get("out_of_memory")) for reply in replies):
            return f"does not fit: {full} of {len(started)} clients ran out of memory"
        for concurrency in setting.sizes.concurrency:
            round_s = _round(setting, started, concurrency, number)
            seconds.setdefault(("article", concurrency), []).append(round_s)
    return ""


def _round(setting: Setting, started: list[Client], concurrency: int, number: int) -> float:
    """Run one round; return its seconds."""
    began = time.monotonic()
    way = started[0].way
    work = [(client, _request(setting, client, concurrency, number)) for client in started]
    # With ours, the leases limit the number of clients that train at a time.
    replies = ask_all(work, setting.deadline, concurrency=concurrency if way == "article" else None)
    for client, reply in zip(started, replies, strict=True):
        if not math.isfinite(checked(reply, client)["loss"]):
            raise BenchmarkError(f"{client.name}: it did not train: loss {reply['loss']}")
    _average([setting.result(client) for client in started], setting.folder / f"{way}-weights.pkl")
    return round(time.monotonic() - began, 3)


def _request(setting: Setting, client: Client, concurrency: int, seed: int) -> dict[str, Any]:
    return setting.fit_request(client, setting.sizes.round_clients, seed, num_gpus=1 / concurrency)


def _average(results: list[Path], into: Path) -> None:
    """Write the mean of the clients' weights. Only one client's weights are in memory at a time."""
    total: list[Any] = []
    for path in results:
        arrays = pickle.loads(path.read_bytes())
        total = [a + b for a, b in zip(total, arrays, strict=True)] if total else arrays
    mean = [(a / len(results)).astype(a.dtype) for a in map(np.asarray, total)]
    into.write_bytes(pickle.dumps(mean, protocol=5))


def _row(seconds: Seconds, way: str, concurrency: int) -> dict[str, Any]:
    rounds_s, article_s = seconds[way, concurrency], seconds.get(("article", concurrency), [])
    # The last run of ours may have no pair.
    ratios = [theirs / mine for mine, theirs in zip(rounds_s, article_s, strict=False)]
    return {
        "way": way,
        "concurrency": concurrency,
        "runs": len(rounds_s),
        "round_s": rounds_s,
        "median_s": round(median(rounds_s), 3),
        "rounds_per_minute": round(60 / median(rounds_s), 3),
        "to_article": round(median(ratios), 3) if ratios else None,
    }


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError if no round was measured."""
    if not result["rows"]:
        raise BenchmarkError("throughput: the time was over before the end of the first round")


def show(result: dict[str, Any]) -> None:
    work = f"{result['clients']} clients, {result['steps']} steps of {result['batch']} images"
    title = f"{work} ({result['images']}); article: {result['article']}"
    table.show(title, result["rows"], "way concurrency rounds_per_minute median_s to_article runs")
