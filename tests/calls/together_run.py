"""Simulates a client in two rounds. Each worker, or each of its ranks, writes a note of what it could do."""

from __future__ import annotations

import json
import os
import sys

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flower_gpu import simulate

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Write the notes of all ranks, and return the pid of this worker."""
    from together_tasks import look_in_ranks

    config = message.content["config"]
    look_in_ranks(str(config["other"]), str(config["notes"]))
    return Message(RecordDict({"metrics": MetricRecord({"pid": os.getpid()})}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Send the client two messages, and print the pid of the worker that handled each."""
    config = {name: str(context.run_config[name]) for name in ("other", "notes")}
    for _ in range(2):
        [node] = grid.get_node_ids()
        records = RecordDict({"config": ConfigRecord(config), "arrays": ArrayRecord()})
        [reply] = grid.send_and_receive([Message(records, node, "train")])
        print(json.dumps(reply.error.reason if reply.has_error() else dict(reply.content["metrics"])))


simulate((server, client), num_supernodes=1, progress=False, verbose=False, **json.loads(sys.argv[1]))
