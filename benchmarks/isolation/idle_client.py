"""One long-lived client: imports Flower, does some fits and then holds its weights and waits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import flwr.compat.client.app  # noqa: F401 - where start_client comes from
from flwr.client import NumPyClient

from benchmarks.isolation.ways import PLAIN, WAYS, Run
from benchmarks.shared import weights as sample
from benchmarks.shared.member import LIBRARY, serve, wait_until_gone
from benchmarks.shared.weights import Weights


class Client(NumPyClient):
    """Runs its fit in one of the ways and keeps the weights."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.weights: Weights = []

    def fit(self, parameters: Weights, config: dict[str, Any]) -> Any:
        pid, self.weights = self.run("update", parameters)
        wait_until_gone(pid)
        return self.weights, 1, {}


def prepare(way_name: str, size_mb: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    client = _client(way_name)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        for _ in range(request["fits"]):
            result, _, _ = client.fit(sample.make(size_mb), {})
            sample.check(result, size_mb, 1)
        return {"torch": LIBRARY in sys.modules, "verified": True}

    return answer


def _client(way_name: str) -> Any:
    if way_name == PLAIN:
        return None
    start_method = WAYS[way_name].start_method
    if start_method is None:
        return Client(WAYS[way_name].prepare())
    from flower_gpu import GPUClient

    return GPUClient("benchmarks.isolation.tasks:fit", start_method=start_method)


if __name__ == "__main__":
    serve(lambda: prepare(sys.argv[1], float(sys.argv[2])))
