"""``context.state``: what the function does to it in the worker has been done to it here, in place."""

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
from mod_messages import EVERYWHERE, context, message, told
from properties import examples
from record_strategies import contents, records

from flower_gpu import ClientCallError, gpu_mod
from flower_gpu.flower.message_call import take_over

MOMENTUM = np.linspace(-1, 1, 40_000, dtype=np.float32).reshape(200, 200)


@st.composite
def record_dicts(draw: st.DrawFn) -> RecordDict:
    """Records under a few names, of which two may have the very same one."""
    there = draw(st.lists(records, min_size=1, max_size=4))
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=5))
    return RecordDict({name: draw(st.sampled_from(there)) for name in names})


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
def test_every_change_is_there_in_the_next_call(method: str) -> None:
    of = context(state=state())
    held, records = of.state, dict(of.state)
    seen = []

    def outer(received: Message, its: Context, call_next: Any) -> Message:
        numbers = its.state["numbers"]
        reply: Message = call_next(received, its)
        seen.append((numbers["calls"], its.state["numbers"] is numbers))
        return reply

    app = app_of(functions.counts, method, outer)
    pids = [told(app(message(), of))["pid"]]
    after_one = MOMENTUM * np.float32(0.9) + np.float32(1 / 3)
    assert held["arrays"]["momentum"].numpy().tobytes() == after_one.tobytes()
    of.state["removed"] = ConfigRecord({"it": "comes again"})
    pids += [told(app(message(), of))["pid"]]

    assert of.state is held
    # Flower's order of records is that of a dict: what was removed and added is the last one.
    assert list(of.state) == ["numbers", "arrays", "retyped", "new"]
    assert (len(set(pids)) == 2) == (method != "in-process")
    assert held["numbers"] == {"calls": 2, "pid": pids[1]} and held["numbers"] is records["numbers"]
    assert seen == [(1, True), (2, True)]
    momentum, other = held["arrays"]["momentum"].numpy(), held["arrays"]["other"].numpy()
    assert momentum.tobytes() == (after_one * np.float32(0.9) + np.float32(1 / 3)).tobytes()
    assert (momentum.dtype, momentum.shape, other.tolist()) == (np.float32, (200, 200), [1.5])
    assert held["arrays"] is records["arrays"] and list(held["arrays"]) == ["momentum", "other"]
    assert isinstance(held["retyped"], MetricRecord) and held["retyped"] == {"was": 1}
    assert held["new"] == {"text": "added", "list": [1, 2], "bytes": b"\0\xff", "bool": True}
    assert type(held["new"]["bool"]) is bool


def test_another_state_in_its_place_is_taken_over_too() -> None:
    of = context(state=state())
    held = of.state
    app_of(functions.reassigns, "forkserver")(message(), of)
    assert of.state is held and list(held) == ["other"] and held["other"]["pid"] != os.getpid()


def test_after_a_failed_call_it_is_what_it_was() -> None:
    of, sent = context(state=state()), message()
    held, before = of.state, contents(of.state)
    records = dict(of.state)
    with pytest.raises(ClientCallError, match="ValueError: after it has changed everything"):
        app_of(functions.spoils_and_fails, "fork")(sent, of)
    assert of.state is held and contents(held) == before
    assert all(held[name] is record for name, record in records.items())
    assert list(sent.content["arrays"]) == ["weight", "count"]


@settings(max_examples=examples(100))
@given(record_dicts(), record_dicts())
def test_any_state_becomes_any_other_in_place(old: RecordDict, new: RecordDict) -> None:
    expected = contents(new)
    kinds = {name: (type(record), record) for name, record in old.items()}
    held = list(map(id, old.values()))
    take_over(old, new)
    assert contents(old) == expected and contents(new) == expected
    for name, (kind, record) in kinds.items():
        if name in new and type(new[name]) is kind and held.count(id(record)) == 1:
            assert old[name] is record
    # No two names have got one record that had one each: to change the one must not change the other.
    for name in old:
        for other in old:
            if name != other and old[name] is old[other]:
                assert new[name] is new[other]


@settings(max_examples=examples(100))
@given(record_dicts())
def test_a_state_taken_over_from_itself_stays(state: RecordDict) -> None:
    expected = contents(state)
    take_over(state, state)
    assert contents(state) == expected


@settings(max_examples=examples(10))
@given(record_dicts(), record_dicts())
def test_any_records_come_back_as_they_were_sent(content: RecordDict, state: RecordDict) -> None:
    """Into the worker, into the state, and back in the reply and in the state."""
    app = app_of(functions.gives_state_back, "forkserver")
    expected, before = contents(content), contents(state)
    of = context(state=state)
    for _ in range(2):  # a second time what came back is sent
        reply = app(Message(content, dst_node_id=13, message_type="train"), of)
        assert contents(reply.content) == expected
        content = reply.content
    kept = {name: rest for name, *rest in before}
    kept.update((name, rest) for name, *rest in expected)
    assert {name: rest for name, *rest in contents(of.state)} == kept
