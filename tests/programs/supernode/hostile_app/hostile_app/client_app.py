"""The client makes all attempts, and reports their results."""

import json

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from hostile_app.attempts import attempts

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    targets = json.loads(message.content["config"]["targets"])
    results = attempts(targets)
    context.state["kept"] = ConfigRecord({"times": 1})
    return Message(RecordDict({"found": ConfigRecord({"found": json.dumps(results)})}), reply_to=message)
