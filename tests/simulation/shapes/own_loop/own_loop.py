"""No strategy: a loop of its own that pushes and pulls, with five kinds of messages."""

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


def metrics(**found: float) -> RecordDict:
    """Return a reply's content."""
    return RecordDict({"metrics": MetricRecord(found)})


@client_app.query()
def describe(message: Message, context: Context) -> Message:
    """Say which node it is."""
    return Message(metrics(partition=int(context.node_config["partition-id"])), reply_to=message)


@client_app.query("moments")
def moments(message: Message, context: Context) -> Message:
    """Return sums, never the numbers."""
    own = values(context)
    return Message(metrics(count=len(own), total=own.sum(), squares=(own**2).sum()), reply_to=message)


@client_app.train("warm_up")
def warm_up(message: Message, context: Context) -> Message:
    """Keep the global moments for later."""
    context.state["moments"] = message.content["moments"]
    return Message(metrics(kept=1), reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Take a step towards the mean of its own numbers, scaled by the moments that it keeps."""
    kept = context.state["moments"]
    (center,) = message.content["arrays"].to_numpy_ndarrays()
    scaled = (values(context) - kept["mean"]) / kept["std"]
    arrays = ArrayRecord([center + message.content["config"]["rate"] * (scaled.mean() - center)])
    return Message(RecordDict({"arrays": arrays}), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Fail on one node: the loop goes on without it."""
    if context.node_config["partition-id"] == 2:
        raise ValueError("no numbers to evaluate with")
    (center,) = message.content["arrays"].to_numpy_ndarrays()
    return Message(metrics(loss=float(np.abs(center).sum())), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Ask, push, pull until all are there, and average."""
    while len(nodes := sorted(grid.get_node_ids())) < 4:  # as such loops do: some are late
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
