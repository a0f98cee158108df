"""``gpu_mod`` calls any function of a ClientApp in a worker: arguments, replies, and order of mods."""

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
from mod_messages import EVERYWHERE, context, message, reply_values

from flower_gpu import ClientCallError, InvalidResultError, gpu_mod


@pytest.mark.parametrize("method", EVERYWHERE)
def test_each_message_is_handled_in_a_new_worker(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))
    app = ClientApp(mods=[gpu_mod(start_method=method)])
    for register in (app.train(), app.evaluate(), app.query()):
        register(functions.report_call)
    app.train("special")(functions.special)
    kinds = ["train", "train.special", "evaluate", "query"]
    pids = []
    for kind in kinds:
        sent = message(kind)
        reply = app(sent, context())
        values = reply_values(reply)
        assert values["kind"] == (kind if kind != "train.special" else "the special one")
        assert (values.get("partition", 3), values.get("lr", 0.1)) == (3, 0.1)
        assert (reply.metadata.dst_node_id, reply.metadata.message_type) == (13, kind)
        assert (reply.metadata.run_id, reply.metadata.reply_to_message_id) == (12, sent.metadata.message_id)
        pids.append(values["pid"])
    if method == "in-process":
        assert set(pids) == {os.getpid()}
    else:
        assert os.getpid() not in pids and len(set(pids)) == len(pids)
    started = events_of(tmp_path, "worker_started")
    assert [(event["client"], event["task"], event["start_method"]) for event in started] == [
        ("3", kind, method) for kind in kinds
    ]


def test_a_worker_has_the_identity_of_its_client() -> None:
    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.train()(functions.writes_to_another)
    metadata = app(message(), context()).content["told"]
    assert metadata == {"src_task_id": 11, "run_id": 12, "src_node_id": 13, "dst_node_id": 77}


def test_a_client_without_a_partition_is_named_by_its_node(
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
    assert [event["client"] for event in events_of(tmp_path, "worker_started")] == [
        "13",
        "of the launcher",
        "mine",
    ]


def test_a_mod_of_the_function_overrides_that_of_the_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))

    def named_mod(name: str) -> Any:
        return gpu_mod(start_method="forkserver", env={"MOD_TEST_WHICH": name}, name=name)

    def between(received: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(received, context)
        reply.content["between"] = ConfigRecord({"pid": os.getpid()})
        return reply

    app = ClientApp(mods=[named_mod("app"), between])
    app.train(mods=[named_mod("function")])(functions.report_call)
    app.evaluate()(functions.report_call)
    app.query(mods=[named_mod("twice"), named_mod("innermost")])(functions.report_call)
    replies = {kind: app(message(kind), context()) for kind in ("train", "evaluate", "query")}
    names = {kind: reply_values(reply)["which"] for kind, reply in replies.items()}
    assert names == {"train": "function", "evaluate": "app", "query": "innermost"}
    assert [event["client"] for event in events_of(tmp_path, "worker_started")] == [
        "function",
        "app",
        "innermost",
    ]
    # A mod between two GPU mods runs in the process in which the inner one is called.
    assert replies["train"].content["between"]["pid"] == os.getpid()
    assert replies["evaluate"].content["between"]["pid"] == reply_values(replies["evaluate"])["pid"]


@pytest.mark.parametrize("method", ["forkserver", "in-process"])
def test_a_client_fn_handles_all_kinds_of_messages_in_workers(method: str) -> None:
    ins = FitIns(ndarrays_to_parameters([np.zeros(3)]), {"round": 4})
    app = ClientApp(functions.client_fn, mods=[gpu_mod(start_method=method)])

    def ask(kind: str, content: RecordDict) -> RecordDict:
        return app(Message(content, dst_node_id=13, message_type=kind), context()).content

    fit = compat.recorddict_to_fitres(ask("train", compat.fitins_to_recorddict(ins, True)), True)
    assert np.frombuffer(fit.parameters.tensors[0][-24:]).tolist() == [1, 1, 1]
    assert (fit.num_examples, fit.metrics["name"], fit.metrics["round"]) == (5, "partition 3", 4)
    assert (fit.metrics["pid"] == os.getpid()) == (method == "in-process")
    evaluate_ins = EvaluateIns(ins.parameters, {})
    evaluated = compat.recorddict_to_evaluateres(
        ask("evaluate", compat.evaluateins_to_recorddict(evaluate_ins, True))
    )
    assert (evaluated.loss, evaluated.metrics["name"]) == (0.5, "partition 3")
    request = compat.getpropertiesins_to_recorddict(GetPropertiesIns({}))
    properties_res = compat.recorddict_to_getpropertiesres(ask("get_properties", request))
    assert (properties_res.properties["pid"] == os.getpid()) == (method == "in-process")
    request = compat.getparametersins_to_recorddict(GetParametersIns({}))
    parameters_res = compat.recorddict_to_getparametersres(ask("get_parameters", request), True)
    pid = np.frombuffer(parameters_res.parameters.tensors[0][-24:])[0]
    assert (pid == os.getpid()) == (method == "in-process")


@pytest.mark.parametrize(
    ("client_fn", "name"),
    [(functions.client_fn_with_cid, "cid 3"), (functions.forgets_to_convert, "not converted")],
)
def test_older_forms_of_client_fn_are_accepted(client_fn: Any, name: str) -> None:
    app = ClientApp(client_fn, mods=[gpu_mod(start_method="forkserver")])
    content = compat.fitins_to_recorddict(FitIns(ndarrays_to_parameters([]), {}), True)
    reply = app(Message(content, dst_node_id=13, message_type="train"), context())
    metrics = compat.recorddict_to_fitres(reply.content, True).metrics
    assert metrics["name"] == name and metrics["pid"] != os.getpid()


@pytest.mark.parametrize("method", EVERYWHERE)
def test_a_lifespan_is_active_while_the_function_runs(method: str, tmp_path: Path) -> None:
    """A worker that has not inherited the result of the client's lifespan runs it again."""
    app = ClientApp(mods=[gpu_mod(start_method=method)])
    app.lifespan()(functions.lives)
    app.train()(functions.in_lifespan)
    log, client_context = tmp_path / "log", context({"log": str(tmp_path / "log")})
    pid = reply_values(app(message(), client_context))["pid"]
    own_pid = os.getpid()
    lines = log.read_text().splitlines()
    if method == "forkserver":
        assert lines == [f"begin {own_pid}", f"begin {pid}", f"end {pid}", f"end {own_pid}"]
    else:
        assert lines == [f"begin {own_pid}", f"end {own_pid}"]
    times = len(lines) // 2
    assert client_context.state["lifespan"] == {"begun": times, "ended": times}


def test_a_lifespan_that_fails_only_in_the_worker_is_reported(tmp_path: Path) -> None:
    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.lifespan()(functions.fails_on_second_use)
    app.train()(functions.report_call)
    with pytest.raises(ClientCallError, match=r"^train of client 3: OSError: the database is locked$"):
        app(message(), context({"log": str(tmp_path / "log")}))


def test_functions_of_a_script_run_in_workers(run_script: Callable[..., Any]) -> None:
    """They cannot be imported, as in a notebook. The worker must not run the script again."""
    completed = run_script(
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
    assert completed.stdout == "script\n42 42\n"


def test_error_messages_and_empty_messages_reach_the_function_unchanged() -> None:
    def passes(received: Message, context: Context) -> Message:
        content = RecordDict({"report": ConfigRecord({"error": received.has_error()})})
        if received.has_error():
            content["text"] = ConfigRecord({"reason": received.error.reason, "code": received.error.code})
        return Message(content, reply_to=received)

    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.train()(passes)
    empty = Message(RecordDict(), dst_node_id=13, message_type="train")
    assert app(empty, context()).content["report"] == {"error": False}
    reply = app(Message(Error(code=7, reason="the node is gone"), reply_to=message()), context())
    assert reply.content["text"] == {"reason": "the node is gone", "code": 7}


def test_an_error_reply_is_passed_on() -> None:
    def answers(received: Message, context: Context) -> Message:
        context.state["seen"] = MetricRecord({"it": 1})
        return Message(Error(code=9, reason="not today"), reply_to=received)

    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.train()(answers)
    client_context = context()
    reply = app(message(), client_context)
    assert (reply.error.code, reply.error.reason) == (9, "not today")
    assert client_context.state["seen"] == {"it": 1}


def test_mods_of_flower_work_around_gpu_mod(caplog: pytest.LogCaptureFixture) -> None:
    """An update of norm 20 is clipped to 4 by the inner mod, then to 2 by the outer one."""
    # The noise is tiny, so that the effect of both clippings can be checked.
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


def test_all_ranks_give_one_reply_and_one_state() -> None:
    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.train()(functions.in_ranks)
    client_context = context()
    client_context.state["calls"] = MetricRecord({"number": 6})
    sent = message()
    reply = app(sent, client_context)
    values = reply_values(reply)
    assert (values["world"], values["rank"]) == (2, 0)
    assert reply.metadata.reply_to_message_id == sent.metadata.message_id
    metrics = reply.content["metrics"]
    assert dict(metrics) == {"num-examples": 5, "loss": 0.5, "epochs": 3, "of-each": [1.0, 2.0]}
    assert dict(client_context.state["calls"]) == {"number": 7, "rank": 0}


def test_ranks_that_disagree_fail_and_leave_the_state_unchanged() -> None:
    app = ClientApp(mods=[gpu_mod])
    app.train()(functions.in_ranks_that_disagree)
    client_context = context()
    client_context.state["calls"] = MetricRecord({"number": 6})
    with pytest.raises(InvalidResultError, match=r"train of client 3: .*rank 0 5, rank 1 6"):
        app(message(), client_context)
    assert dict(client_context.state["calls"]) == {"number": 6}
