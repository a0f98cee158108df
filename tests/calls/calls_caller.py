"""A client process that makes calls on command. Each line on stdin is a command as a JSON list."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import calls_tasks
import numpy as np
from forked import serve

import flower_gpu
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import BESIDE_GPU, ON_CPU
from flower_gpu.leases.ledger import Ledger


class LogLines(logging.Handler):
    """Keeps all logged lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


log_lines = LogLines()


def run(task: str, *args: Any, weights: list[list[int]] | None = None, **options: Any) -> Any:
    """Run one call. ``weights``: shapes of the arrays of zeros that are passed as weights."""
    if weights is not None:
        options["weights"] = [np.zeros(shape, np.float32) for shape in weights]
        value = flower_gpu.run_in_worker(task, *args, **options)
        assert (
            all(not array.any() for array in options["weights"])
            or options.get("start_method") == "in-process"
        )
        return value
    return flower_gpu.run_in_worker(task, *args, **options)


def follow(steps: list[Any], **options: Any) -> Any:
    """Run a call with these steps of calls_tasks."""
    return run("calls_tasks:follow", steps, **options)


def run_confined(task: str, *args: Any, write: list[str], **options: Any) -> Any:
    """Run one call in a confined worker. ``write``: folders that the worker can also write into."""
    import confined_calls

    from flower_gpu.programs.confine import Allowed

    code = [str(Path(__file__).parents[1])]
    return confined_calls.run_confined(task, *args, allowed=Allowed(write=tuple(write)), code=code, **options)


def run_in_threads(*calls: tuple[str, list[Any], dict[str, Any]]) -> list[Any]:
    """Run several calls at the same time."""
    values: list[Any] = [None] * len(calls)

    def run_call_number(number: int) -> None:
        task, args, options = calls[number]
        values[number] = answer_to("run", [task, *args], options)

    threads = [threading.Thread(target=run_call_number, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return values


def fit(
    config: dict[str, Any],
    node_config: dict[str, Any] | None = None,
    run_config: dict[str, Any] | None = None,
    shapes: tuple[tuple[int, ...], ...] = ((2, 3),),
    **options: Any,
) -> Any:
    """Let a GPUClient train once, and return its metrics."""
    from flwr.app import Context, RecordDict

    context = Context(1, 1, node_config or {}, RecordDict(), run_config or {})
    client = flower_gpu.GPUClient("calls_tasks:train", context=context, **options)
    weights = [np.zeros(shape, np.float32) for shape in shapes]
    return client.fit(weights, config)[2]


def app(config: dict[str, Any], **options: Any) -> Any:
    """Let a ClientApp handle a message of the server. Return the status and the metrics of its result."""
    from flwr.app import Context, Message, RecordDict
    from flwr.client import ClientApp
    from flwr.common import FitIns, ndarrays_to_parameters
    from flwr.compat.common.recorddict_compat import fitins_to_recorddict, recorddict_to_fitres
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

    def client_fn(context: Context) -> Any:
        return flower_gpu.GPUClient("calls_tasks:train", context=context, **options).to_client()

    ins = FitIns(ndarrays_to_parameters([np.zeros(3, np.float32)]), config)
    message = Message(fitins_to_recorddict(ins, True), dst_node_id=1, message_type="train")
    reply = ClientApp(client_fn)(message, Context(1, 1, {}, RecordDict(), {}))
    result = recorddict_to_fitres(reply.content, False)
    return {"code": result.status.code.name, "message": result.status.message, **result.metrics}


def look_like_start_client() -> None:
    """Look like a process that has called ``start_client``."""
    import flwr.compat.client.app  # noqa: F401


def evaluate(**options: Any) -> Any:
    evaluate_fn = flower_gpu.gpu_evaluate("calls_tasks:evaluate", **options)
    return evaluate_fn(1, [np.zeros(3, np.float32)], {})


def footprints() -> list[Any]:
    peaks_by_key = Footprints().entries()
    return [
        [key.task, key.weights, list(key.sizes), peaks.peak_bytes]
        for key, peaks in peaks_by_key.items()
        if key.gpu not in (ON_CPU, BESIDE_GPU)
    ]


def environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def lose_gpu_once_granted() -> None:
    """Make the GPU lost at the moment the next lease is granted."""
    acquire = Ledger.acquire

    def acquire_and_lose_gpu(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        ticket = acquire(self, *args, **kwargs)
        with open(f"{os.environ['NVML_STUB_DIR']}/gpu-0", "a") as file:
            file.write("error 15\n")
        return ticket

    Ledger.acquire = acquire_and_lose_gpu  # type: ignore[method-assign]


def lines() -> list[str]:
    """Return the lines logged since the last call."""
    new_lines, log_lines.lines = log_lines.lines, []
    return new_lines


_COMMANDS = {
    function.__name__: function
    for function in (
        run,
        follow,
        run_confined,
        run_in_threads,
        fit,
        app,
        look_like_start_client,
        evaluate,
        footprints,
        environment,
        lose_gpu_once_granted,
        lines,
        calls_tasks.seen,
    )
}


def answer_to(command: str, arguments: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": _COMMANDS[command](*arguments, **options)}
    except Exception as error:
        chain = []
        link: BaseException | None = error
        while link is not None:
            chain.append([type(link).__name__, str(link)])
            link = link.__cause__
        return {"error": [kind.__name__ for kind in type(error).__mro__], "chain": chain}


def main() -> None:
    os.setsid()
    calls_tasks.use_light_servers()
    answers = os.fdopen(os.dup(1), "w")
    # Workers print to stdout too, and their output must not mix with the answers.
    os.dup2(2, 1)
    logger = logging.getLogger("flwr.flower_gpu")
    logger.addHandler(log_lines)
    print(json.dumps({"value": os.getpid()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer_to(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve(main)
