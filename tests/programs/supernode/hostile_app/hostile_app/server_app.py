"""The server sends each node one message, and writes the replies to a file."""

import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    while len(nodes := list(grid.get_node_ids())) < settings["num-clients"]:
        time.sleep(0.2)
    content = RecordDict({"config": ConfigRecord({"targets": Path(settings["targets"]).read_text()})})
    messages = [Message(content, dst_node_id=node, message_type="train") for node in nodes]
    replies = [
        {"error": reply.error.reason} if reply.has_error() else json.loads(reply.content["found"]["found"])
        for reply in grid.send_and_receive(messages, timeout=120)
    ]
    Path(settings["found"]).write_text(json.dumps(replies))
