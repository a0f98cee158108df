"""The client. Only its workers import torch."""

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

from flower_gpu import gpu_mod

app = ClientApp(mods=[gpu_mod])


@app.train()
def train(message, context):
    from scaffold import training

    return training.train(message, context)


@app.query()
def query(message, context):
    """Return this client's kept variables, which the server could also compute from earlier replies."""
    return Message(RecordDict(dict(context.state)), reply_to=message)
