"""Part ``throughput``: rounds per minute on images of CIFAR's size, 1, 2, 4, 8 clients at a time.

A round: every client trains from the same weights, and the mean of what they send is the next ones. Ours asks
for ``num_gpus=1/n`` and all clients are asked at once. The article's clients are all on the GPU and stay
there; n are asked at a time.
"""

from __future__ import annotations

import math
import pickle
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.clients import Client, TimeLimitError, ask, ask_all, checked, clients
from benchmarks.gpu.setting import Setting, prepare_images
from benchmarks.shared import table
from benchmarks.shared.processes import BenchmarkError

LIMIT_S = 480.0

_WAYS = ("ours", "article")


def measure(setting: Setting) -> dict[str, Any]:
    source = prepare_images(setting)
    sizes = setting.sizes
    seconds: dict[tuple[str, int], list[float]] = {}
    runs, article = 0, ""
    with clients("ours", sizes.round_clients) as ours:
        _make_weights(setting, ours[0])
        try:
            _round(setting, "ours", ours, max(sizes.concurrency), 0)  # starts what it keeps
            for number in range(1, sizes.runs + 1):
                for concurrency in sizes.concurrency:
                    took = _round(setting, "ours", ours, concurrency, number)
                    seconds.setdefault(("ours", concurrency), []).append(took)
                article = article or _article_rounds(setting, number, seconds)
                runs += 1
        except TimeLimitError as error:
            print(f"throughput: {error}; what was measured before counts", flush=True)
    return {
        "model": setting.model,
        "images": source,
        "clients": sizes.round_clients,
        "batch": sizes.batch,
        "steps": sizes.steps,
        "complete_runs": runs,
        "article": article or "fits",
        "retries": sum(event["event"] == "out_of_memory" for event in setting.trace()),
        "rows": [_row(way, concurrency, taken) for (way, concurrency), taken in seconds.items()],
        "ours_to_article": _ratios(seconds, sizes.concurrency),
    }


def _article_rounds(setting: Setting, number: int, seconds: dict[tuple[str, int], list[float]]) -> str:
    """Measure the article's rounds of one run; where its clients do not all fit, say so.

    They are there for these rounds only: what they hold while they wait would be missing for ours.
    """
    with clients("article", setting.sizes.round_clients) as members:
        # Each starts CUDA and builds its model, which is not part of a round.
        work = [(client, _request(setting, "article", client, 1, 0)) for client in members]
        replies = ask_all(work, setting.deadline, at_a_time=max(setting.sizes.concurrency))
        if full := sum(bool(reply.get("out_of_memory")) for reply in replies):
            return f"does not fit: {full} of {len(members)} clients ran out of memory"
        for concurrency in setting.sizes.concurrency:
            took = _round(setting, "article", members, concurrency, number)
            seconds.setdefault(("article", concurrency), []).append(took)
    return ""


def _make_weights(setting: Setting, client: Client) -> None:
    args = [0, setting.model]
    request = {"do": "initial", "args": args, "options": {"gpu": "never"}, "result": str(_weights(setting))}
    checked(ask(client, request, setting.deadline), client)


def _round(setting: Setting, way: str, members: list[Client], concurrency: int, number: int) -> float:
    """Run one round; return its seconds."""
    began = time.monotonic()
    work = [(client, _request(setting, way, client, concurrency, number)) for client in members]
    at_a_time = concurrency if way == "article" else None
    replies = ask_all(work, setting.deadline, at_a_time=at_a_time)
    for client, reply in zip(members, replies, strict=True):
        if not math.isfinite(checked(reply, client)["loss"]):
            raise BenchmarkError(f"{client.name}: it did not train: loss {reply['loss']}")
    results = [_result(setting, client) for client in members]
    _average(results, _weights(setting).with_name(f"{way}.pkl"))
    return round(time.monotonic() - began, 3)


def _average(results: list[Path], into: Path) -> None:
    """Write the mean of the clients' weights; one client at a time is in memory."""
    total: list[Any] = []
    for path in results:
        arrays = pickle.loads(path.read_bytes())
        total = [a + b for a, b in zip(total, arrays, strict=True)] if total else arrays
    mean = [(a / len(results)).astype(a.dtype) for a in map(np.asarray, total)]
    into.write_bytes(pickle.dumps(mean, protocol=5))


def _request(setting: Setting, way: str, client: Client, concurrency: int, number: int) -> dict[str, Any]:
    sizes = setting.sizes
    own = _weights(setting).with_name(f"{way}.pkl")
    config = {
        "model": setting.model, "folder": str(setting.folder), "partition": client.number,
        "partitions": sizes.round_clients, "batch": sizes.batch, "steps": sizes.steps, "seed": number,
    }  # fmt: skip
    return {
        "do": "fit",
        "config": config,
        "weights": str(own if own.exists() else _weights(setting)),
        "result": str(_result(setting, client)),
        "options": {"num_gpus": 1 / concurrency, "name": str(client.number)} if way == "ours" else {},
    }


def _weights(setting: Setting) -> Path:
    return setting.folder / "weights.pkl"


def _result(setting: Setting, client: Client) -> Path:
    return setting.folder / f"{client.name.replace(' ', '-')}.pkl"


def _row(way: str, concurrency: int, taken: list[float]) -> dict[str, Any]:
    return {
        "way": way,
        "concurrency": concurrency,
        "runs": len(taken),
        "round_s": taken,
        "median_s": round(median(taken), 3),
        "rounds_per_minute": round(60 / median(taken), 3),
    }


def _ratios(seconds: dict[tuple[str, int], list[float]], concurrency: tuple[int, ...]) -> dict[str, float]:
    """Return how many rounds ours does while the article's way does one: medians of pairs of one run."""
    ratios = {}
    for number in concurrency:
        ours, article = seconds.get(("ours", number), []), seconds.get(("article", number), [])
        pairs = list(zip(ours, article, strict=False))  # the last may have no other
        if pairs:
            ratios[str(number)] = round(median(theirs / mine for mine, theirs in pairs), 3)
    return ratios


def check(result: dict[str, Any]) -> None:
    """Raise BenchmarkError where nothing was measured."""
    if not result["rows"]:
        raise BenchmarkError("throughput: the time was over before a round was measured")


def show(result: dict[str, Any]) -> None:
    def cell(way: str, concurrency: int, key: str) -> str:
        for row in result["rows"]:
            if (row["way"], row["concurrency"]) == (way, concurrency):
                return f"{row[key]:.2f}"
        return ""

    known = sorted({row["concurrency"] for row in result["rows"]})
    table.show(
        f"rounds per minute, {result['clients']} clients, {result['steps']} steps of {result['batch']} "
        f"images each ({result['images']}); article: {result['article']}",
        ("at a time", *_WAYS, "ours to article", "ours s per round", "article s per round"),
        [
            (
                number,
                *(cell(way, number, "rounds_per_minute") for way in _WAYS),
                f"{result['ours_to_article'][str(number)]:.2f}x"
                if str(number) in result["ours_to_article"]
                else "",
                *(cell(way, number, "median_s") for way in _WAYS),
            )
            for number in known
        ],
    )
