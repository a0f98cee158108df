"""A client whose training function is vectorized, if the server says so."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    from small_models import task

    config = message.content["config"]
    weights = message.content["arrays"].to_numpy_ndarrays()
    partition = context.node_config["partition-id"]
    trained, count = task.train(weights, partition, config["server-round"], config)
    metrics = MetricRecord({"num-examples": count, "partition": float(partition)})
    return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)
