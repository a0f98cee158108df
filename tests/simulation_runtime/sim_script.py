"""A simulation in a script that defines everything and never ends. Argument: a folder for notes."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from flower_gpu import gpu_mod

CLIENTS, WAITING = 4, 3
FOLDER = Path(sys.argv[1])


def note(name, **facts):
    with open(FOLDER / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\n")


def resources(context):
    # Only the call that never ends has a limit, because other calls may take long on a busy machine.
    calls = context.state.get("calls")
    hangs = context.node_config["partition-id"] == 3 and calls is not None and calls["count"] == 1
    return {"timeout_s": 3} if hangs else None


def actor_noted(message, context, call_next):
    note(
        "actors",
        partition=context.node_config["partition-id"],
        actor=os.getpid(),
        kind=message.metadata.message_type,
    )
    return call_next(message, context)


app = ClientApp(mods=[actor_noted, gpu_mod(num_gpus=0.25, resources=resources)])


@app.train()
def train(message, context):
    partition, server_round = context.node_config["partition-id"], message.content["config"]["server-round"]
    context.state.setdefault("calls", MetricRecord({"count": 0}))["count"] += 1
    note("trains", visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    if server_round == 2:
        if partition == 1:
            raise ValueError(f"client {partition} has no data")
        if partition == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if partition == 3:
            time.sleep(600)
    arrays = {key: Array(np.asarray(value.numpy() + 1)) for key, value in message.content["arrays"].items()}
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)


@app.train("waiting")
def waiting(message, context):
    note("waiting", partition=context.node_config["partition-id"], pid=os.getpid())
    time.sleep(600)


server = ServerApp()


@server.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    arrays = ArrayRecord({"w": Array(np.zeros(4, np.float32))})
    result = strategy.start(grid, arrays, num_rounds=3, timeout=300)
    note("server", trained=result.arrays["w"].numpy().tolist())
    nodes = list(grid.get_node_ids())[:WAITING]
    list(grid.send_and_receive([Message(RecordDict(), node_id, "train.waiting") for node_id in nodes]))


if __name__ == "__main__":
    backend = {"init_args": {"num_cpus": WAITING}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, CLIENTS, backend_config=backend)
