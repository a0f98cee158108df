"""No strategy: an own loop that pushes and pulls five kinds of messages."""

import json
import time

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

client_app = ClientApp()
server_app = ServerApp()


def values(context: Context) -> np.ndarray:
    """Return a client's own numbers."""
    partition = int(context.node_config["partition-id"])
    return np.random.default_rng(partition).normal(partition, 1.0, 50)


def metrics(**values_by_name: float) -> RecordDict:
    """Return a reply's content."""
    return RecordDict({"metrics": MetricRecord(values_by_name)})


@client_app.query()
def describe(message: Message, context: Context) -> Message:
    """Return the partition of the node."""
    return Message(metrics(partition=int(context.node_config["partition-id"])), reply_to=message)


@client_app.query("moments")
def moments(message: Message, context: Context) -> Message:
    """Return sums, but never the values."""
    own = values(context)
    return Message(metrics(count=len(own), total=own.sum(), squares=(own**2).sum()), reply_to=message)


@client_app.train("warm_up")
def warm_up(message: Message, context: Context) -> Message:
    """Keep the global moments for later."""
    context.state["moments"] = message.content["moments"]
    return Message(metrics(kept=1), reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Take a step towards the mean of the client's values, scaled by the moments in its state."""
    kept = context.state["moments"]
    (center,) = message.content["arrays"].to_numpy_ndarrays()
    scaled = (values(context) - kept["mean"]) / kept["std"]
    arrays = ArrayRecord([center + message.content["config"]["rate"] * (scaled.mean() - center)])
    return Message(RecordDict({"arrays": arrays}), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Fail on one node. The loop continues without it."""
    if context.node_config["partition-id"] == 2:
        raise ValueError("no numbers to evaluate with")
    (center,) = message.content["arrays"].to_numpy_ndarrays()
    return Message(metrics(loss=float(np.abs(center).sum())), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Push messages, pull until all replies are here, and average them."""
    # Such loops wait like this because some nodes connect late.
    while len(nodes := sorted(grid.get_node_ids())) < 4:
        time.sleep(0.1)

    def ask(content: RecordDict, kind: str) -> list[Message]:
        return list(grid.send_and_receive([Message(content, node, kind, group_id="7") for node in nodes]))

    partitions = sorted(reply.content["metrics"]["partition"] for reply in ask(RecordDict(), "query"))
    sums = [reply.content["metrics"] for reply in ask(RecordDict(), "query.moments")]
    count, total, squares = (sum(each[key] for each in sums) for key in ("count", "total", "squares"))
    mean = total / count
    moments = MetricRecord({"mean": mean, "std": (squares / count - mean**2) ** 0.5})
    kept = ask(RecordDict({"moments": moments}), "train.warm_up")

    center = np.full(1, 4.0)
    for _ in range(2):
        content = RecordDict({"arrays": ArrayRecord([center]), "config": ConfigRecord({"rate": 0.5})})
        waiting = set(grid.push_messages([Message(content, node, "train") for node in nodes]))
        replies: list[Message] = []
        while waiting:
            pulled = list(grid.pull_messages(waiting))
            replies += pulled
            waiting -= {reply.metadata.reply_to_message_id for reply in pulled}
            time.sleep(0.01)
        center = np.mean([reply.content["arrays"].to_numpy_ndarrays()[0] for reply in replies], axis=0)
    evaluated = ask(RecordDict({"arrays": ArrayRecord([center])}), "evaluate")
    told = {
        "partitions": partitions,
        "moments": [round(moments["mean"], 6), round(moments["std"], 6)],
        "kept": len(kept),
        "center": round(float(center[0]), 6),
        "failed": sum(reply.has_error() for reply in evaluated),
        "losses": [round(reply.content["metrics"]["loss"], 6) for reply in evaluated if reply.has_content()],
    }
    print("RESULT", json.dumps(told), flush=True)
