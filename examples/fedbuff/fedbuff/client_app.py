"""The client. It is the same for FedBuff and FedAvg. Only its workers import torch."""

from flwr.clientapp import ClientApp

from flower_gpu import gpu_mod

app = ClientApp(mods=[gpu_mod])


@app.train()
def train(message, context):
    from fedbuff import task

    return task.train(message, context)
