"""An ordinary client: its part of the digits, or of a file with images."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from buffered import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    node, server_round = context.node_config, message.content["config"]["server-round"]
    place = node["partition-id"], node["num-partitions"]
    weights = message.content["arrays"].to_torch_state_dict()
    trained, count = task.train(weights, *place, server_round, context.run_config)
    content = {"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": count})}
    return Message(RecordDict(content), reply_to=message)
