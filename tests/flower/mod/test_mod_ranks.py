"""Functions of a ClientApp on several GPUs: one reply, one state."""

from __future__ import annotations

import mod_ranks
import pytest
from flwr.app import MetricRecord
from flwr.clientapp import ClientApp
from mod_messages import context, message, told

from flower_gpu import InvalidResultError, gpu_mod

pytestmark = pytest.mark.timeout(120)


def test_one_reply_and_one_state_of_all_ranks() -> None:
    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.train()(mod_ranks.train)
    own = context()
    own.state["calls"] = MetricRecord({"number": 6})
    sent = message()
    reply = app(sent, own)
    found = told(reply)
    assert (found["world"], found["rank"]) == (2, 0)
    assert reply.metadata.reply_to_message_id == sent.metadata.message_id
    metrics = reply.content["metrics"]
    assert dict(metrics) == {"num-examples": 5, "loss": 0.5, "epochs": 3, "of-each": [1.0, 2.0]}
    assert dict(own.state["calls"]) == {"number": 7, "rank": 0}


def test_ranks_that_disagree_fail_and_change_nothing() -> None:
    app = ClientApp(mods=[gpu_mod])
    app.train()(mod_ranks.wrong)
    own = context()
    own.state["calls"] = MetricRecord({"number": 6})
    with pytest.raises(InvalidResultError, match=r"train of client 3: .*rank 0 5, rank 1 6"):
        app(message(), own)
    assert dict(own.state["calls"]) == {"number": 6}
