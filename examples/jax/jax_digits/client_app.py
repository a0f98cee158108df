"""The client. Only its workers import JAX."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_gpu import gpu_mod

app = ClientApp(mods=[gpu_mod])


@app.train()
def train(message, context):
    from jax_digits import task

    settings = {**context.run_config, **context.node_config, **message.content["config"]}
    weights, metrics = task.train(message.content["arrays"].to_numpy_ndarrays(), settings)
    reply = {"arrays": ArrayRecord(weights), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(reply), reply_to=message)
