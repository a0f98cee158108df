"""Changes that the function makes to ``context.state`` in the worker reach the client's state, in place."""

from __future__ import annotations

import os
from typing import Any

import mod_functions as functions
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from mod_messages import EVERYWHERE, context, message, reply_values
from properties import examples
from record_strategies import contents, records

from flower_gpu import ClientCallError, gpu_mod
from flower_gpu.flower.message_call import take_over

MOMENTUM = np.linspace(-1, 1, 40_000, dtype=np.float32).reshape(200, 200)


@st.composite
def record_dicts(draw: st.DrawFn) -> RecordDict:
    """Records under a few names. Two names may share one record."""
    choices = draw(st.lists(records, min_size=1, max_size=4))
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=5))
    return RecordDict({name: draw(st.sampled_from(choices)) for name in names})


def state() -> RecordDict:
    return RecordDict(
        {
            "numbers": MetricRecord({"calls": 0}),
            "removed": ConfigRecord({"it": "goes"}),
            "arrays": ArrayRecord({"momentum": Array(MOMENTUM), "other": Array(np.array([1.5]))}),
            "retyped": ConfigRecord({"is": "a config record"}),
        }
    )


def app_of(function: Any, method: str, *outer: Any) -> ClientApp:
    app = ClientApp(mods=[*outer, gpu_mod(start_method=method)])
    app.train()(function)
    return app


@pytest.mark.parametrize("method", EVERYWHERE)
def test_the_next_call_sees_every_change(method: str) -> None:
    client_context = context(state=state())
    client_state, records = client_context.state, dict(client_context.state)
    seen = []

    def outer(received: Message, context: Context, call_next: Any) -> Message:
        numbers = context.state["numbers"]
        reply: Message = call_next(received, context)
        seen.append((numbers["calls"], context.state["numbers"] is numbers))
        return reply

    app = app_of(functions.counts, method, outer)
    pids = [reply_values(app(message(), client_context))["pid"]]
    after_one = MOMENTUM * np.float32(0.9) + np.float32(1 / 3)
    assert client_state["arrays"]["momentum"].numpy().tobytes() == after_one.tobytes()
    client_context.state["removed"] = ConfigRecord({"it": "comes again"})
    pids += [reply_values(app(message(), client_context))["pid"]]

    assert client_context.state is client_state
    # Flower keeps the records in the order of a dict, so a record that was removed and added comes last.
    assert list(client_context.state) == ["numbers", "arrays", "retyped", "new"]
    assert (len(set(pids)) == 2) == (method != "in-process")
    assert (
        client_state["numbers"] == {"calls": 2, "pid": pids[1]}
        and client_state["numbers"] is records["numbers"]
    )
    assert seen == [(1, True), (2, True)]
    momentum, other = client_state["arrays"]["momentum"].numpy(), client_state["arrays"]["other"].numpy()
    assert momentum.tobytes() == (after_one * np.float32(0.9) + np.float32(1 / 3)).tobytes()
    assert (momentum.dtype, momentum.shape, other.tolist()) == (np.float32, (200, 200), [1.5])
    assert client_state["arrays"] is records["arrays"] and list(client_state["arrays"]) == [
        "momentum",
        "other",
    ]
    assert isinstance(client_state["retyped"], MetricRecord) and client_state["retyped"] == {"was": 1}
    assert client_state["new"] == {"text": "added", "list": [1, 2], "bytes": b"\0\xff", "bool": True}
    assert type(client_state["new"]["bool"]) is bool


def test_a_replaced_state_is_copied_into_the_clients_state() -> None:
    client_context = context(state=state())
    client_state = client_context.state
    app_of(functions.reassigns, "forkserver")(message(), client_context)
    assert (
        client_context.state is client_state
        and list(client_state) == ["other"]
        and client_state["other"]["pid"] != os.getpid()
    )


def test_a_failed_call_leaves_the_state_unchanged() -> None:
    client_context, sent = context(state=state()), message()
    client_state, contents_before = client_context.state, contents(client_context.state)
    records = dict(client_context.state)
    with pytest.raises(ClientCallError, match="ValueError: after it has changed everything"):
        app_of(functions.spoils_and_fails, "fork")(sent, client_context)
    assert client_context.state is client_state and contents(client_state) == contents_before
    assert all(client_state[name] is record for name, record in records.items())
    assert list(sent.content["arrays"]) == ["weight", "count"]


@settings(max_examples=examples(100))
@given(record_dicts(), record_dicts())
def test_any_state_can_be_turned_into_any_other_in_place(old: RecordDict, new: RecordDict) -> None:
    expected = contents(new)
    kinds = {name: (type(record), record) for name, record in old.items()}
    record_ids = list(map(id, old.values()))
    take_over(old, new)
    assert contents(old) == expected and contents(new) == expected
    for name, (kind, record) in kinds.items():
        if name in new and type(new[name]) is kind and record_ids.count(id(record)) == 1:
            assert old[name] is record
    # Names that have separate records in the new state must not share one: changing one would change both.
    for name in old:
        for other in old:
            if name != other and old[name] is old[other]:
                assert new[name] is new[other]


@settings(max_examples=examples(100))
@given(record_dicts())
def test_a_state_copied_from_itself_is_unchanged(state: RecordDict) -> None:
    expected = contents(state)
    take_over(state, state)
    assert contents(state) == expected


@settings(max_examples=examples(10))
@given(record_dicts(), record_dicts())
def test_any_records_come_back_unchanged(content: RecordDict, state: RecordDict) -> None:
    """The records travel to the worker, into the state, and back in the reply and in the state."""
    app = app_of(functions.gives_state_back, "forkserver")
    expected, state_before = contents(content), contents(state)
    client_context = context(state=state)
    for _ in range(2):  # the second call sends the content that came back
        reply = app(Message(content, dst_node_id=13, message_type="train"), client_context)
        assert contents(reply.content) == expected
        content = reply.content
    expected_state = {name: rest for name, *rest in state_before}
    expected_state.update((name, rest) for name, *rest in expected)
    assert {name: rest for name, *rest in contents(client_context.state)} == expected_state
