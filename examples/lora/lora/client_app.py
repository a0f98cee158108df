"""The client. It receives adapters, trains them, and sends them back."""

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_gpu import gpu_mod
from lora import task

app = ClientApp(mods=[gpu_mod])


@app.train()
def train(message, context):
    config, node = context.run_config, context.node_config
    call = config["seed"], message.content["config"]["server-round"], node["partition-id"]
    torch.manual_seed(int(np.random.SeedSequence(call).generate_state(1)[0]))
    model = task.with_adapters(config, message.content["arrays"])
    loader = task.load_partition(node["partition-id"], node["num-partitions"], config["batch-size"])
    loss = task.train(model, loader, config["local-epochs"], config["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(task.adapters(model)), "metrics": metrics})
    return Message(content, reply_to=message)
