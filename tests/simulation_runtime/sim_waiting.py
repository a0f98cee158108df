"""A simulation whose calls wait to be told to end. Arguments: a folder, clients, what each call leases."""

import json
import os
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

FOLDER, CLIENTS, GPU_MEMORY = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


def actor_noted(message, context, call_next):
    line = {"partition": context.node_config["partition-id"], "actor": os.getpid()}
    with open(FOLDER / "actors.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    return call_next(message, context)


app = ClientApp(mods=[actor_noted, gpu_mod(gpu_memory=GPU_MEMORY)])


@app.train()
def train(message, context):
    partition = context.node_config["partition-id"]
    with open(FOLDER / "trains.jsonl", "a") as file:
        file.write(json.dumps({"partition": partition, "pid": os.getpid()}) + "\n")
    while not (FOLDER / "go").exists():
        time.sleep(0.02)
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)


server = ServerApp()


@server.main()
def main(grid, context):
    arrays = ArrayRecord({"w": Array(np.zeros(4, np.float32))})
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    strategy.start(grid, arrays, num_rounds=1, timeout=120)


if __name__ == "__main__":
    backend = {"init_args": {"num_cpus": CLIENTS}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, CLIENTS, backend_config=backend)
