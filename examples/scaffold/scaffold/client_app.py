"""The client. Torch is imported by its workers only."""

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
    """Return what this client has kept; the server could add it up from what it was sent."""
    return Message(RecordDict(dict(context.state)), reply_to=message)
