"""Any function of a ClientApp is called in a worker: what it gets, what comes back, which mod counts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mod_functions as functions
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, arrays_size_mod, fixedclipping_mod, message_size_mod
from flwr.common import EvaluateIns, FitIns, GetParametersIns, GetPropertiesIns, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from launched import events_of
from mod_messages import EVERYWHERE, context, message, told

from flower_gpu import ClientCallError, InvalidResultError, gpu_mod


@pytest.mark.parametrize("method", EVERYWHERE)
def test_each_kind_of_message_is_handled_in_a_worker_of_its_own(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))
    app = ClientApp(mods=[gpu_mod(start_method=method)])
    for register in (app.train(), app.evaluate(), app.query()):
        register(functions.where)
    app.train("special")(functions.special)
    kinds = ["train", "train.special", "evaluate", "query"]
    pids = []
    for kind in kinds:
        sent = message(kind)
        reply = app(sent, context())
        found = told(reply)
        assert found["kind"] == (kind if kind != "train.special" else "the special one")
        assert (found.get("partition", 3), found.get("lr", 0.1)) == (3, 0.1)
        assert (reply.metadata.dst_node_id, reply.metadata.message_type) == (13, kind)
        assert (reply.metadata.run_id, reply.metadata.reply_to_message_id) == (12, sent.metadata.message_id)
        pids.append(found["pid"])
    if method == "in-process":
        assert set(pids) == {os.getpid()}
    else:
        assert os.getpid() not in pids and len(set(pids)) == len(pids)
    started = events_of(tmp_path, "worker_started")
    assert [(one["client"], one["task"], one["start_method"]) for one in started] == [
        ("3", kind, method) for kind in kinds
    ]


def test_a_worker_is_for_flower_who_its_client_is() -> None:
    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.train()(functions.writes_to_another)
    found = app(message(), context()).content["told"]
    assert found == {"src_task_id": 11, "run_id": 12, "src_node_id": 13, "dst_node_id": 77}


def test_a_client_without_partition_has_its_nodes_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))
    app = ClientApp(mods=[gpu_mod(start_method="fork")])
    app.query()(functions.special)
    app(message("query"), Context(12, 13, {}, RecordDict(), {}))
    monkeypatch.setenv("FLOWER_GPU_CLIENT", "of the launcher")
    app(message("query"), context())
    named = ClientApp(mods=[gpu_mod(start_method="fork", name="mine")])
    named.query()(functions.special)
    named(message("query"), context())
    assert [one["client"] for one in events_of(tmp_path, "worker_started")] == [
        "13",
        "of the launcher",
        "mine",
    ]


def test_a_mod_of_the_function_goes_before_that_of_the_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))

    def which(name: str) -> Any:
        return gpu_mod(start_method="forkserver", env={"MOD_TEST_WHICH": name}, name=name)

    def between(received: Message, of: Context, call_next: Any) -> Message:
        reply: Message = call_next(received, of)
        reply.content["between"] = ConfigRecord({"pid": os.getpid()})
        return reply

    app = ClientApp(mods=[which("app"), between])
    app.train(mods=[which("function")])(functions.where)
    app.evaluate()(functions.where)
    app.query(mods=[which("twice"), which("innermost")])(functions.where)
    replies = {kind: app(message(kind), context()) for kind in ("train", "evaluate", "query")}
    found = {kind: told(reply)["which"] for kind, reply in replies.items()}
    assert found == {"train": "function", "evaluate": "app", "query": "innermost"}
    assert [one["client"] for one in events_of(tmp_path, "worker_started")] == [
        "function",
        "app",
        "innermost",
    ]
    # What is between them runs where the last of them begins.
    assert replies["train"].content["between"]["pid"] == os.getpid()
    assert replies["evaluate"].content["between"]["pid"] == told(replies["evaluate"])["pid"]


@pytest.mark.parametrize("method", ["forkserver", "in-process"])
def test_a_client_fn(method: str) -> None:
    ins = FitIns(ndarrays_to_parameters([np.zeros(3)]), {"round": 4})
    app = ClientApp(functions.client_fn, mods=[gpu_mod(start_method=method)])

    def ask(kind: str, content: RecordDict) -> RecordDict:
        return app(Message(content, dst_node_id=13, message_type=kind), context()).content

    fit = compat.recorddict_to_fitres(ask("train", compat.fitins_to_recorddict(ins, True)), True)
    assert np.frombuffer(fit.parameters.tensors[0][-24:]).tolist() == [1, 1, 1]
    assert (fit.num_examples, fit.metrics["name"], fit.metrics["round"]) == (5, "partition 3", 4)
    assert (fit.metrics["pid"] == os.getpid()) == (method == "in-process")
    asked = EvaluateIns(ins.parameters, {})
    evaluated = compat.recorddict_to_evaluateres(
        ask("evaluate", compat.evaluateins_to_recorddict(asked, True))
    )
    assert (evaluated.loss, evaluated.metrics["name"]) == (0.5, "partition 3")
    given = compat.getpropertiesins_to_recorddict(GetPropertiesIns({}))
    found = compat.recorddict_to_getpropertiesres(ask("get_properties", given))
    assert (found.properties["pid"] == os.getpid()) == (method == "in-process")
    given = compat.getparametersins_to_recorddict(GetParametersIns({}))
    first = compat.recorddict_to_getparametersres(ask("get_parameters", given), True)
    pid = np.frombuffer(first.parameters.tensors[0][-24:])[0]
    assert (pid == os.getpid()) == (method == "in-process")


@pytest.mark.parametrize(
    ("client_fn", "name"),
    [(functions.client_fn_of_old, "cid 3"), (functions.forgets_to_convert, "not converted")],
)
def test_a_client_fn_as_they_once_were(client_fn: Any, name: str) -> None:
    app = ClientApp(client_fn, mods=[gpu_mod(start_method="forkserver")])
    content = compat.fitins_to_recorddict(FitIns(ndarrays_to_parameters([]), {}), True)
    reply = app(Message(content, dst_node_id=13, message_type="train"), context())
    metrics = compat.recorddict_to_fitres(reply.content, True).metrics
    assert metrics["name"] == name and metrics["pid"] != os.getpid()


@pytest.mark.parametrize("method", EVERYWHERE)
def test_a_lifespan_is_there_for_the_function(method: str, tmp_path: Path) -> None:
    """A worker that has not inherited what the client's has done runs it again."""
    app = ClientApp(mods=[gpu_mod(start_method=method)])
    app.lifespan()(functions.lives)
    app.train()(functions.in_lifespan)
    log, of = tmp_path / "log", context({"log": str(tmp_path / "log")})
    pid = told(app(message(), of))["pid"]
    here = os.getpid()
    lines = log.read_text().splitlines()
    if method == "forkserver":
        assert lines == [f"begin {here}", f"begin {pid}", f"end {pid}", f"end {here}"]
    else:
        assert lines == [f"begin {here}", f"end {here}"]
    times = len(lines) // 2
    assert of.state["lifespan"] == {"begun": times, "ended": times}


def test_a_lifespan_that_breaks_in_the_worker_only(tmp_path: Path) -> None:
    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.lifespan()(functions.breaks_at_once)
    app.train()(functions.where)
    with pytest.raises(ClientCallError, match=r"^train of client 3: OSError: the database is locked$"):
        app(message(), context({"log": str(tmp_path / "log")}))


def test_functions_of_a_script(run_script: Callable[..., Any]) -> None:
    """As in a notebook: they are nowhere to be imported from. The script does not run again."""
    done = run_script(
        """
        import os
        from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp
        from flwr.supercore.task_identity import TaskIdentity
        from flower_gpu import gpu_mod

        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 2, 3
        print("script")
        CONSTANT = 41
        app = ClientApp(mods=[gpu_mod(start_method="forkserver")])

        def helper():
            return CONSTANT + 1

        @app.lifespan()
        def lifespan(context):
            context.state["lifespan"] = ConfigRecord({"helper": helper()})
            yield

        @app.train()
        def train(message, context):
            context.state["count"] = MetricRecord({"pid": os.getpid(), "value": helper()})
            return Message(RecordDict({"seen": context.state["lifespan"]}), reply_to=message)

        context = Context(2, 3, {}, RecordDict(), {})
        reply = app(Message(RecordDict(), dst_node_id=3, message_type="train"), context)
        assert context.state["count"]["pid"] != os.getpid()
        print(context.state["count"]["value"], reply.content["seen"]["helper"])
        """
    )
    assert done.stdout == "script\n42 42\n"


def test_an_error_instead_of_content_and_an_empty_message_arrive_as_they_are() -> None:
    def passes(received: Message, of: Context) -> Message:
        content = RecordDict({"found": ConfigRecord({"error": received.has_error()})})
        if received.has_error():
            content["text"] = ConfigRecord({"reason": received.error.reason, "code": received.error.code})
        return Message(content, reply_to=received)

    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.train()(passes)
    empty = Message(RecordDict(), dst_node_id=13, message_type="train")
    assert app(empty, context()).content["found"] == {"error": False}
    reply = app(Message(Error(code=7, reason="the node is gone"), reply_to=message()), context())
    assert reply.content["text"] == {"reason": "the node is gone", "code": 7}


def test_a_reply_that_is_an_error_message_is_passed_on() -> None:
    def answers(received: Message, of: Context) -> Message:
        of.state["seen"] = MetricRecord({"it": 1})
        return Message(Error(code=9, reason="not today"), reply_to=received)

    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.train()(answers)
    of = context()
    reply = app(message(), of)
    assert (reply.error.code, reply.error.reason) == (9, "not today")
    assert of.state["seen"] == {"it": 1}


def test_flowers_own_mods_outside_of_it(caplog: pytest.LogCaptureFixture) -> None:
    """An update of norm 20 is clipped to 4 by one mod, to 2 by the next one."""
    # Nearly no noise: it is to be seen that all of them have had their part.
    local_dp = LocalDpMod(clipping_norm=4.0, sensitivity=1e-6, epsilon=10.0, delta=1e-5)
    mods = [message_size_mod, arrays_size_mod, fixedclipping_mod, local_dp]
    app = ClientApp(mods=[*mods, gpu_mod(start_method="forkserver")])
    app.train()(functions.adds_ten)
    arrays = ArrayRecord({"w": Array(np.zeros(4, np.float32))})
    config = ConfigRecord({"clipping_norm": 2.0})
    sent = Message(RecordDict({"arrays": arrays, "config": config}), dst_node_id=13, message_type="train")
    with caplog.at_level("INFO", "flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        reply = app(sent, context())
        logging.getLogger("flwr").removeHandler(caplog.handler)
    assert np.linalg.norm(reply.content["arrays"]["w"].numpy()) == pytest.approx(2.0, abs=1e-3)
    assert reply.content["metrics"]["pid"] != os.getpid()
    for words in (
        "Incoming message size: ",
        "Incoming `ArrayRecord` size statistics:",
        "Outgoing message size: ",
        "LocalDpMod: parameters are clipped by value: 4.0000.",
        "fixedclipping_mod: parameters are clipped by value: 2.0000.",
    ):
        assert words in caplog.text, words


def test_one_reply_and_one_state_of_all_ranks() -> None:
    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.train()(functions.in_ranks)
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
    app.train()(functions.in_ranks_that_disagree)
    own = context()
    own.state["calls"] = MetricRecord({"number": 6})
    with pytest.raises(InvalidResultError, match=r"train of client 3: .*rank 0 5, rank 1 6"):
        app(message(), own)
    assert dict(own.state["calls"]) == {"number": 6}
