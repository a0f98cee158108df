"""One client of the GPU benchmarks, a process of its own. ``python -m benchmarks.gpu.client WAY``.

``article``: it trains in itself and stays, as articles about Flower show it. ``ours``: its calls run in
workers under leases. ``bare``: in the same workers, but without a lease, so nothing is counted or capped.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.shared.member import serve

_START_METHOD = "forkserver"

Answer = Callable[[dict[str, Any]], dict[str, Any]]
Call = Callable[..., Any]


def article() -> dict[str, Call]:
    import torch  # noqa: F401 - it stays, so it is there before it is asked

    from benchmarks.gpu import work as gpu_work

    kept: list[gpu_work.Trainer] = []

    def fit(weights: Any, config: dict[str, Any], **_: Any) -> Any:
        if not kept:
            kept.append(gpu_work.Trainer(config))
        return kept[0].fit(weights, config)

    return {"fit": fit}


def ours() -> dict[str, Call]:
    from flower_gpu import GPUClient, run_in_worker

    def fit(weights: Any, config: dict[str, Any], **options: Any) -> Any:
        return GPUClient("benchmarks.gpu.work:fit", start_method=_START_METHOD, **options).fit(
            weights, config
        )

    def call(task: str) -> Call:
        return lambda *args, **options: run_in_worker(
            f"benchmarks.gpu.work:{task}", *args, start_method=_START_METHOD, **options
        )

    return {
        "fit": fit,
        "hold": call("hold"),
        "steps": call("steps"),
        "initial": call("initial_weights"),
        "take_from_cuda": call("take_from_cuda"),
    }


def bare() -> dict[str, Call]:
    from flower_gpu.calls import leased_worker
    from flower_gpu.workers import caller as worker
    from flower_gpu.workers.call import Call as WorkerCall

    def hold(*args: Any) -> Any:
        prepared = WorkerCall("benchmarks.gpu.work:hold", args, setup=leased_worker.SETUP, label="bare hold")
        return worker.run(prepared, _START_METHOD)

    return {"hold": hold}


WAYS: dict[str, Callable[[], dict[str, Call]]] = {"article": article, "ours": ours, "bare": bare}


def prepare(way: str) -> Answer:
    from flower_gpu.errors import GPUOutOfMemoryError
    from flower_gpu.frameworks.out_of_memory import out_of_memory_in

    calls = WAYS[way]()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            told = _run(calls, request)
        except Exception as error:
            told = {
                "error": type(error).__name__,
                "message": str(error),
                "out_of_memory": isinstance(error, GPUOutOfMemoryError)
                or out_of_memory_in(error) is not None,
            }
        return {"began": began, **told, "ended": time.monotonic()}

    return answer


def _run(calls: dict[str, Call], request: dict[str, Any]) -> dict[str, Any]:
    """Run what is asked. Weights are in files: they are too large for a line of JSON."""
    do, options = request["do"], request.get("options", {})
    if do == "initial":
        _save(Path(request["result"]), calls[do](*request["args"], **options))
        return {}
    if do == "fit":
        weights = pickle.loads(Path(request["weights"]).read_bytes())
        trained, _, metrics = calls[do](weights, request["config"], **options)
        _save(Path(request["result"]), trained)
        return dict(metrics)
    told: dict[str, Any] = calls[do](*request["args"], **options)
    return told


def _save(path: Path, weights: Any) -> None:
    with path.open("wb") as file:
        pickle.dump(weights, file, protocol=5)


if __name__ == "__main__":
    serve(lambda: prepare(sys.argv[1]))
