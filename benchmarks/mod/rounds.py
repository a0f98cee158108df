"""A simulation with Ray whose rounds alternate between an app with and without gpu_mod.

Prints the seconds of each round as JSON.
"""

from __future__ import annotations

import json
import sys
import time

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from benchmarks.shared import weights
from flower_gpu import gpu_mod

_TIMEOUT_S = 600.0
#: Message types that lead to the same function, by way.
_TYPES = {"without": "train.without", "with": "train.with_mod"}


def no_op(message: Message, context: Context) -> Message:
    """Return the weights unchanged."""
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


def main() -> None:
    size_mb = float(sys.argv[1])
    clients, rounds, actors = map(int, sys.argv[2:])
    seconds: dict[str, list[float]] = {way: [] for way in _TYPES}
    client = ClientApp()
    client.train("without")(no_op)
    client.train("with_mod", mods=[gpu_mod(gpu_memory="1GiB")])(no_op)
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        model = RecordDict(
            {"arrays": ArrayRecord(weights.make(size_mb)), "config": ConfigRecord({"server-round": 1})}
        )
        while len(nodes := list(grid.get_node_ids())) < clients:
            time.sleep(0.1)
        for number in range(rounds + 1):
            for way in _TYPES if number % 2 else reversed(_TYPES):
                messages = [Message(model, node, _TYPES[way]) for node in nodes]
                began = time.perf_counter()
                replies = list(grid.send_and_receive(messages, timeout=_TIMEOUT_S))
                round_s = time.perf_counter() - began
                _check(replies, model, clients)
                # In round 0, the actors import the app and the fork server starts.
                if number:
                    seconds[way].append(round_s)

    backend = {"init_args": {"num_cpus": actors}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, clients, backend_config=backend)
    print(json.dumps(seconds))


def _check(replies: list[Message], model: RecordDict, clients: int) -> None:
    """Raise ValueError unless all clients returned the weights unchanged."""
    if len(replies) != clients:
        raise ValueError(f"{len(replies)} of {clients} clients replied")
    sent = model["arrays"]
    for reply in replies:
        if reply.has_error():
            raise ValueError(f"a client failed: {reply.error.reason}")
        received = reply.content["arrays"]
        if list(sent) != list(received) or any(sent[name].data != received[name].data for name in sent):
            raise ValueError("the weights have changed")


if __name__ == "__main__":
    main()
