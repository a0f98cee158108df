"""A Flower app whose clients do nothing, with and without gpu_mod; and what its server sends."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.shared import weights as sample
from flower_gpu import gpu_mod

#: Actions of the app in which the same function is called, by name of the way.
ACTIONS = {"without": "train.without", "with": "train.with_mod"}


def nothing(message: Message, context: Context) -> Message:
    """Give the weights back as they came."""
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content, reply_to=message)


def client_app(start_method: str = "auto") -> ClientApp:
    app = ClientApp()
    app.train("without")(nothing)
    app.train("with_mod", mods=[gpu_mod(start_method=start_method, gpu_memory="1GiB")])(nothing)
    return app


def content(size_mb: float) -> RecordDict:
    """Return a model of this size, and a config as a strategy sends it."""
    return RecordDict(
        {"arrays": ArrayRecord(sample.make(size_mb)), "config": ConfigRecord({"server-round": 1})}
    )


def new_message(model: RecordDict, action: str, node_id: int = 13) -> Message:
    """Return a message with its own copy of the model, as each message of a server brings it."""
    copies = {
        name: Array(array.dtype, array.shape, array.stype, bytes(bytearray(array.data)))
        for name, array in model["arrays"].items()
    }
    parts = {"arrays": ArrayRecord(copies), "config": ConfigRecord(dict(model["config"]))}
    return Message(RecordDict(parts), dst_node_id=node_id, message_type=action)


def new_context() -> Context:
    node_config = {"partition-id": 3, "num-partitions": 5}
    return Context(run_id=12, node_id=13, node_config=node_config, state=RecordDict(), run_config={})


def check(reply: Message, model: RecordDict) -> None:
    """Raise ValueError unless the weights came back as they were sent."""
    if reply.has_error():
        raise ValueError(f"a client failed: {reply.error.reason}")
    sent, received = model["arrays"], reply.content["arrays"]
    if list(sent) != list(received) or any(sent[name].data != received[name].data for name in sent):
        raise ValueError("other weights came back than were sent")
