"""What every worker of a virtual client does, done once where they are forked from."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity

from flower_gpu.calls import leased_worker
from flower_gpu.flower import message_call
from flower_gpu.workers import transport
from flower_gpu.workers import worker as child

_TIMES = 16  # CPython 3.11 and later rewrite code that has run a few times, which copies its pages
_LARGE = 1 << 18  # elements: enough to be mapped


def rehearse() -> None:
    """Handle a few messages to an app that does nothing."""
    identity = {name: getattr(TaskIdentity, name) for name in message_call.IDENTITY}
    app = ClientApp()
    app.train()(_answer)
    for _ in range(_TIMES):
        _one(app)
    for name, value in identity.items():
        setattr(TaskIdentity, name, value)


def _one(app: ClientApp) -> None:
    content = RecordDict(
        {
            "arrays": ArrayRecord([np.ones(_LARGE, np.float32), np.ones(2, np.float32)]),
            "config": ConfigRecord({"server-round": 1}),
        }
    )
    identity = dict.fromkeys(message_call.IDENTITY, 1)
    for name, value in identity.items():
        setattr(TaskIdentity, name, value)
    message = Message(content, SUPERLINK_NODE_ID + 1, "train")
    context = Context(1, SUPERLINK_NODE_ID + 1, {}, RecordDict(), {})
    request, reply = transport.create("flower-gpu-rehearsal"), transport.create("flower-gpu-rehearsal")
    try:
        args = (app, None, message, context, identity)
        transport.write_request((message_call.run, args, {}, (), "rehearsal: "), request)
        leased_worker.setup()
        load = partial(transport.read_request, request)
        outcome = child.run_task({}, None, load, lambda _: None)
        assert outcome is not None
        child.leave_reply(outcome, reply)
    finally:
        os.close(request)
        os.close(reply)


def _answer(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)
