"""A client that trains on its part of the digits. Torch is imported in functions, and not at module level."""

import json
import os
import sys
from pathlib import Path

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def note(context, name, **facts):
    line = {"pid": os.getpid(), "partition": context.node_config["partition-id"], **facts}
    with open(Path(context.run_config["notes"], f"{name}.jsonl"), "a") as file:
        file.write(json.dumps(line) + "\n")


def actor_noted(message, context, call_next):
    """A mod of the app. It runs in the actor, before and after the call."""
    before = sorted(sys.modules)
    reply = call_next(message, context)
    opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    note(
        context,
        "actors",
        before=before,
        after=sorted(sys.modules),
        nvidia=[path for path in opened if path.startswith("/dev/nvidia")],
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        fits=context.state["fits"]["count"],
    )
    return reply


app = ClientApp(mods=[actor_noted])


@app.train()
def train(message, context):
    from digits_app import task

    fits = context.state.setdefault("fits", MetricRecord({"count": 0}))
    fits["count"] += 1
    note(context, "fits", visible=os.environ.get("CUDA_VISIBLE_DEVICES"), fit=fits["count"])
    state = message.content["arrays"].to_torch_state_dict()
    partition, of = context.node_config["partition-id"], context.node_config["num-partitions"]
    seed = 1000 * message.content["config"]["server-round"] + partition
    state, num_examples = task.train(state, partition, of, seed)
    metrics = MetricRecord({"num-examples": num_examples})
    return Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)
