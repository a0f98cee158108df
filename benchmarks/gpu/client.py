"""A client of the GPU benchmarks, a process of its own: ``python -m benchmarks.gpu.client WAY``.

``article``: trains in its own process and stays, as in articles about Flower. ``ours``: its calls run in
workers with leases. ``bare``: in workers without a lease, so that its memory is neither counted nor capped.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.shared.member import Answer, serve

_START_METHOD = "forkserver"
_WORK = "benchmarks.gpu.work"

Call = Callable[..., Any]


def article() -> dict[str, Call]:
    # Imported now, because such a client has imported torch before its first message.
    from benchmarks.gpu import work

    trainers: list[Any] = []

    def fit(weights: Any, config: dict[str, Any], **_: Any) -> Any:
        if not trainers:
            trainers.append(work.new_trainer(config))
        return work.fit_with(trainers[0], weights, config)

    return {"fit": fit}


def ours() -> dict[str, Call]:
    from flower_gpu import GPUClient, run_in_worker

    def fit(weights: Any, config: dict[str, Any], **options: Any) -> Any:
        return GPUClient(f"{_WORK}:fit", start_method=_START_METHOD, **options).fit(weights, config)

    def call(task: str) -> Call:
        return lambda *args, **options: run_in_worker(
            f"{_WORK}:{task}", *args, start_method=_START_METHOD, **options
        )

    return {
        "fit": fit,
        **{task: call(task) for task in ("hold", "steps", "initial_weights", "take_from_cuda")},
    }


def bare() -> dict[str, Call]:
    from flower_gpu.calls import grants
    from flower_gpu.workers import caller as worker
    from flower_gpu.workers.call import Call as WorkerCall

    def hold(*args: Any) -> Any:
        prepared = WorkerCall(f"{_WORK}:hold", args, setup=grants.SETUP, label="bare hold")
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
            reply = _run(calls, request)
        except Exception as error:
            is_full = isinstance(error, GPUOutOfMemoryError) or out_of_memory_in(error) is not None
            reply = {"error": type(error).__name__, "message": str(error), "out_of_memory": is_full}
        return {"began": began, **reply, "ended": time.monotonic()}

    return answer


def _run(calls: dict[str, Call], request: dict[str, Any]) -> dict[str, Any]:
    """Run a request. Weights travel in files, because they are too large for a line of JSON."""
    do, options = request["do"], request.get("options", {})
    if do == "initial_weights":
        _save(Path(request["result"]), calls[do](*request["args"], **options))
        return {}
    if do == "fit":
        weights = pickle.loads(Path(request["weights"]).read_bytes())
        trained, _, metrics = calls[do](weights, request["config"], **options)
        _save(Path(request["result"]), trained)
        return dict(metrics)
    reply: dict[str, Any] = calls[do](*request["args"], **options)
    return reply


def _save(path: Path, weights: Any) -> None:
    with path.open("wb") as file:
        pickle.dump(weights, file, protocol=5)


if __name__ == "__main__":
    serve(lambda: prepare(sys.argv[1]))
