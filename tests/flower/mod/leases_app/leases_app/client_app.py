import os
import signal
import time

import numpy as np
import nvml_stub
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_gpu import gpu_mod
from flower_gpu.leases.lease import Lease

app = ClientApp(mods=[gpu_mod(gpu_memory="2GiB", resources={3: {"gpu_memory": "3GiB"}})])


@app.train()
def train(message, context):
    partition = context.node_config["partition-id"]
    rounds = context.state.setdefault("rounds", MetricRecord({"count": 0}))
    rounds["count"] += 1
    if message.content["config"]["server-round"] == 1:
        fail(partition)
    for share in Lease.from_environment(os.environ).shares:
        nvml_stub.allocate(share.uuid, share.memory_bytes)
    time.sleep(1.5)  # others would come meanwhile, if they were let
    arrays = {key: Array(np.asarray(value.numpy() + 1)) for key, value in message.content["arrays"].items()}
    content = {
        "arrays": ArrayRecord(arrays),
        "metrics": MetricRecord({"num-examples": 1, "rounds": rounds["count"]}),
        "who": ConfigRecord({"partition": partition}),
    }
    return Message(RecordDict(content), reply_to=message)


@app.evaluate()
def evaluate(message, context):
    raise RuntimeError("a client was asked to evaluate")


def fail(partition):
    if partition == 1:
        raise ValueError("the data are gone")
    if partition == 2:
        print("these are the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if partition == 3:
        time.sleep(600)
