"""A client that keeps memory from message to message, like a cache of data."""

import time
from pathlib import Path

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
kept: list[bytearray] = []


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take memory, and wait until the other clients of the round have theirs."""
    config = message.content["config"]
    taken = bytearray(b"x") * (int(config["mib"]) << 20)
    if config["keeps"]:
        kept.append(taken)
    begun = Path(str(config["folder"]))
    (begun / str(context.node_config["partition-id"])).touch()
    while len(list(begun.iterdir())) < int(config["clients"]):
        time.sleep(0.02)
    return Message(RecordDict({"taken": MetricRecord({"mib": len(taken) >> 20})}), reply_to=message)
