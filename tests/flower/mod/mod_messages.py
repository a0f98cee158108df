"""Messages and contexts for the ClientApps of these tests, and their replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

#: A forked worker inherits the client's objects. The fork server receives them in a request.
WORKERS = ["fork", "forkserver"]
#: The same, and a call in the client's own process.
EVERYWHERE = [*WORKERS, "in-process"]


def message(kind: str = "train", config: Mapping[str, Any] | None = None) -> Message:
    """Return a message of the server with two arrays and a config."""
    arrays = ArrayRecord(
        {"weight": Array(np.arange(6, dtype=np.float32).reshape(2, 3)), "count": Array(np.array(7))}
    )
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"lr": 0.1, **(config or {})})})
    return Message(content, dst_node_id=13, message_type=kind)


def context(
    node_config: Mapping[str, Any] | None = None,
    run_config: Mapping[str, Any] | None = None,
    state: RecordDict | None = None,
) -> Context:
    """Return the Context of the client with partition 3."""
    return Context(
        run_id=12,
        node_id=13,
        node_config={"partition-id": 3, "num-partitions": 5, **(node_config or {})},
        state=RecordDict() if state is None else state,
        run_config=dict(run_config or {}),
    )


def make_reply(received: Message, **values: Any) -> Message:
    """Return a reply with the received arrays plus 1, and these values."""
    arrays = {
        key: Array(np.asarray(array.numpy() + 1))
        for record in received.content.array_records.values()
        for key, array in record.items()
    }
    content = RecordDict(
        {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 5})}
        | {"told": ConfigRecord(values)}
    )
    return Message(content, reply_to=received)


def reply_values(reply: Message) -> dict[str, Any]:
    """Check the arrays of a reply, and return the values given to :func:`make_reply`."""
    assert reply.content["arrays"]["weight"].numpy().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert reply.content["arrays"]["weight"].numpy().dtype == np.float32
    assert reply.content["arrays"]["count"].numpy() == 8
    return dict(reply.content.config_records["told"])
