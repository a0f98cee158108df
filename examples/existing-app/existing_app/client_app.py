"""The client. The only change is `gpu_mod`."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from existing_app import task
from flower_gpu import gpu_mod

app = ClientApp(mods=[gpu_mod])  # the change; it was: app = ClientApp()


def load(message: Message, context: Context):
    """Return the global model and this client's data."""
    net = task.Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    partition_id, num_partitions = context.node_config["partition-id"], context.node_config["num-partitions"]
    return net, *task.load_partition(partition_id, num_partitions, context.run_config["batch-size"])


def answer(message: Message, metrics: dict, **arrays: ArrayRecord):
    content = RecordDict({**arrays, "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


@app.train()
def train(message: Message, context: Context):
    config = message.content["config"]
    # Each client and round has its own seed, so the same run gives the same model again.
    call = context.run_config["seed"], config["server-round"], context.node_config["partition-id"]
    torch.manual_seed(int(np.random.SeedSequence(call).generate_state(1)[0]))
    net, loader, _ = load(message, context)
    loss = task.train(net, loader, context.run_config["local-epochs"], config["lr"])
    metrics = {"train_loss": loss, "num-examples": len(loader.dataset)}
    return answer(message, metrics, arrays=ArrayRecord(net.state_dict()))


@app.evaluate()
def evaluate(message: Message, context: Context):
    net, _, loader = load(message, context)
    loss, accuracy = task.test(net, loader)
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)}
    return answer(message, metrics)
