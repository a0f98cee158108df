"""A client that returns the model unchanged, after an optional sleep."""

import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from bench_app.replies import reply_to

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    sleeps_s = str(context.run_config.get("sleep-s", "")).split()
    seconds = float(sleeps_s[int(context.node_config["partition-id"])]) if sleeps_s else 0.0
    time.sleep(seconds)
    return reply_to(message, context, message.content["arrays"], 1 + round(1000 * seconds))
