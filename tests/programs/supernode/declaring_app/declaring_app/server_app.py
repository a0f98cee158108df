"""The server sends messages one by one to each client, and writes the replies to a file."""

import json
import time
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    if settings["on-server"]:
        import tinything

        print(f"the server has {tinything.VALUE}", flush=True)
    while not list(grid.get_node_ids()):
        time.sleep(0.1)
    for _ in range(settings["num-messages"]):
        began = time.monotonic()
        nodes = list(grid.get_node_ids())
        messages = [Message(RecordDict(), message_type="train", dst_node_id=node) for node in nodes]
        for reply in grid.send_and_receive(messages):
            report = {"error": reply.error.reason} if reply.has_error() else dict(reply.content["report"])
            with Path(settings["replies-file"]).open("a") as file:
                file.write(json.dumps({**report, "seconds": time.monotonic() - began}) + "\n")
