"""The client. It need not know whether others are waited for. Torch is imported by its workers only."""

from flwr.clientapp import ClientApp

from flower_gpu import gpu_mod

app = ClientApp(mods=[gpu_mod])


@app.train()
def train(message, context):
    from fedbuff import task

    return task.train(message, context)
