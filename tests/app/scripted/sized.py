"""A client whose share of a GPU is in its `gpu_mod`."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_gpu import gpu_mod


def resources(context: Context) -> dict[str, float]:
    """Return a client's resources: the second half of the clients gets more than the first."""
    config = context.node_config
    return {"num_gpus": 0.5} if config["partition-id"] >= config["num-partitions"] // 2 else {}


app = ClientApp(mods=[gpu_mod(resources=resources, num_gpus=0.25)])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Return the weights unchanged."""
    arrays = ArrayRecord(message.content["arrays"].to_numpy_ndarrays())
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
