"""The client reports the value and the location of the declared package."""

import os
import sys

import tinything
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    context.state["seen"] = ConfigRecord({"messages": context.state.get("seen", {}).get("messages", 0) + 1})
    report = {
        "value": tinything.VALUE,
        "file": tinything.__file__,
        "messages": context.state["seen"]["messages"],
        "parent": os.getppid(),
        "python": sys.executable,
    }
    return Message(RecordDict({"report": ConfigRecord(report)}), reply_to=msg)
