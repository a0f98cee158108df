"""A client that gives back what it got, and says who it is."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 1, "partition": float(context.node_config["partition-id"])})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
