"""A client whose author has misspelt the name of the model."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


class Net:
    """A model."""


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the weights as they are."""
    if context.run_config["misspelt-for"] in ("all", str(context.node_config["partition-id"])):
        Nett()  # noqa: F821
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
