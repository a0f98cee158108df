"""The error of a failed call names the client, the reason and the remedy."""

from __future__ import annotations

import os
import re
from typing import Any

import mod_functions as functions
import pytest
from flwr.clientapp import ClientApp
from mod_messages import EVERYWHERE, WORKERS, context, message

import flower_gpu
from flower_gpu import errors, gpu_mod


def fail(failure: str, method: str = "forkserver", **options: Any) -> BaseException:
    """Let a client fail in the given way. Returns the exception that Flower turns into an error message."""
    app = ClientApp(mods=[gpu_mod(start_method=method, **options)])
    app.train()(functions.fails)
    received = message(config={"failure": failure, "client": os.getpid()})
    received.metadata.__dict__.update(_message_id="of the server", _src_node_id=1)
    with pytest.raises(BaseException) as caught:  # KeyboardInterrupt is not an Exception
        app(received, context())
    return caught.value


@pytest.mark.parametrize("method", EVERYWHERE)
def test_an_exception_of_the_function_names_the_client(method: str) -> None:
    error = fail("value", method)
    assert type(error) is flower_gpu.ClientCallError and isinstance(error, flower_gpu.FlowerGPUError)
    assert str(error) == "train of client 3: ValueError: the data are gone"
    assert type(error.__cause__) is ValueError
    if method in WORKERS:
        assert "in fails" in str(error.__cause__.__cause__), "the traceback of the worker is kept"


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (
            "unpicklable",
            errors.WorkerTaskError,
            " raised mod_functions.UnpicklableError: with a lock",
        ),
        ("mute", errors.ClientCallError, ": MuteError"),
        ("weights", errors.WeightsError, ": model has 3 arrays, got 2"),
        ("interrupt", errors.WorkerTaskError, " raised KeyboardInterrupt: "),
        ("kill", errors.WorkerDiedError, r": the worker \(pid \d+\) was killed by SIGKILL \(9\).*last words"),
        ("exit", errors.WorkerDiedError, r": the worker \(pid \d+\) exited with code 3.*last words"),
        ("sleep", errors.WorkerTimeoutError, ": no .* within timeout_s=1.5"),
    ],
)
def test_the_error_for_a_worker_that_ended_names_the_client(
    failure: str, kind: type[Exception], words: str
) -> None:
    error = fail(failure, **({"timeout_s": 1.5} if failure == "sleep" else {}))
    assert type(error) is kind
    assert re.match(f"train of client 3{words}", str(error), re.DOTALL), error


@pytest.mark.parametrize(
    ("failure", "description"),
    [
        ("none", "nothing, not a Message"),
        ("content", "a RecordDict, not a Message"),
        ("a text", "a str, not a Message"),
        ("the message", "the message that it was given: return Message(content,"),
        ("another node's", "a Message that is not a reply to it: return Message(content,"),
        ("a message of its own", "a Message that is not a reply to it: return Message(content,"),
    ],
)
def test_invalid_replies_are_refused(failure: str, description: str) -> None:
    error = fail(failure)
    assert type(error) is flower_gpu.InvalidResultError
    assert str(error).startswith(f"train of client 3: the function returned {description}")


@pytest.mark.parametrize("method", ["fork", "in-process"])
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("odd error", r"ValueError: im\udcffage.png"),
        ("odd reply", r"the reply cannot be sent: 'im\\udcffage.png', in the record 'told'"),
        ("odd state", r"context.state cannot be sent: 'im\\udcffage.png', in the record 'seen'"),
    ],
)
def test_text_that_flower_cannot_send_becomes_an_error_that_it_can_send(
    failure: str, words: str, method: str
) -> None:
    """Protobuf refuses lone surrogates, so without a check the server would wait for ever."""
    text = str(fail(failure, method))
    assert text.startswith(f"train of client 3: {words}")
    text.encode()


def test_a_long_error_of_the_function_is_shortened() -> None:
    app = ClientApp(mods=[gpu_mod(start_method="forkserver")])
    app.train()(functions.fails)
    reply = app(message(config={"failure": "its own error"}), context())
    assert reply.error.code == 77 and len(reply.error.reason) < errors.MOST_CHARACTERS + 100
    assert "characters left out" in reply.error.reason


def test_a_keyboard_interrupt_is_raised_unchanged() -> None:
    assert type(fail("interrupt", "in-process")) is KeyboardInterrupt


# Invalid options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"num_gpu": 1}, TypeError, "no option 'num_gpu'; there are start_method, timeout_s"),
        ({"context": None}, TypeError, "no option 'context': each message brings its own"),
        ({"resources": 0.5}, TypeError, "a function of the Context or a table by partition-id, not a float"),
        ({"resources": {0: 0.5}}, TypeError, 'must give options such as {"num_gpus": 0.5}, or None, not 0.5'),
        ({"resources": {0: {"num_gpu": 1}}}, TypeError, "no option 'num_gpu'"),
        ({"resources": {0: {"num_gpus": 1.5}}}, ValueError, "num_gpus must be a share of one GPU"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_by_gpu_mod(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind) as caught:
        gpu_mod(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize("wrong", [(0.5,), ({"num_gpus": 1}, "2GiB"), (functions.report_call,)])
def test_positional_options_are_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"takes keyword arguments only, such as num_gpus=0.5"):
        gpu_mod(*wrong)


def ask(node_config: dict[str, Any] | None = None, **options: Any) -> Exception:
    app = ClientApp(mods=[gpu_mod(start_method="fork", **options)])
    app.train()(functions.report_call)
    client_context = context(node_config)
    if client_context.node_config["partition-id"] is None:
        del client_context.node_config["partition-id"]
    with pytest.raises(flower_gpu.FlowerGPUError) as caught:
        app(message(), client_context)
    return caught.value


@pytest.mark.parametrize(
    ("node_config", "options", "words"),
    [
        (
            {},
            {"resources": lambda context: {}["3"]},
            "the function given to gpu_mod as resources raised KeyErr",
        ),
        (
            {},
            {"resources": lambda context: 0.5},
            "TypeError: resources of gpu_mod must give options such as ",
        ),
        ({}, {"resources": lambda context: {"gpus": 1}}, "TypeError: no option 'gpus'; there are"),
        (
            {"num-gpus": 1, "gpu-memory": "2GiB"},
            {},
            "--node-config num-gpus=1 and --node-config gpu-memory=",
        ),
        ({"num-gpus": "half"}, {}, "--node-config num-gpus must be a share of one GPU"),
    ],
)
def test_the_error_for_invalid_options_of_a_client_names_the_client(
    node_config: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    assert str(ask(node_config, **options)).startswith(f"train of client 3: {words}")


def test_a_table_by_partition_needs_a_partition_id() -> None:
    text = str(ask({"partition-id": None}, resources={3: {"num_gpus": 1}}))
    assert text.startswith("train of client 13: resources of gpu_mod is a table by partition-id, and th")
    assert "--node-config 'partition-id=0'" in text


@pytest.mark.parametrize(
    ("table", "which"),
    [
        ({3: {"env": {"MOD_TEST_WHICH": "three"}}}, "three"),
        # The keys are strings if the table was read from a file.
        ({"3": {"env": {"MOD_TEST_WHICH": "three"}}}, "three"),
        ({4: {"env": {"MOD_TEST_WHICH": "four"}}}, "default"),
        ({3: None}, "default"),
        ({}, "default"),
    ],
)
def test_a_table_by_partition_gives_options_to_its_clients(table: Any, which: str) -> None:
    app = ClientApp(mods=[gpu_mod(start_method="fork", env={"MOD_TEST_WHICH": "default"}, resources=table)])
    app.train()(functions.report_call)
    assert app(message(), context()).content["told"]["which"] == which
