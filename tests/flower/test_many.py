"""Handlers that take several messages in one call: arguments, replies, and the seeds of messages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

import flower_gpu
from flower_gpu import ConfigError, InvalidResultError, gpu_mod, train_many
from flower_gpu.flower import message_call
from flower_gpu.flower.many import ManyHandler, find_handler, run_many, seed_message


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process the identity of a task, because Flower creates no message without it."""
    for name in message_call.IDENTITY:
        monkeypatch.setattr(TaskIdentity, name, 7)


def message(number: int, content: RecordDict | None = None, kind: str = "train") -> Message:
    message = Message(content or RecordDict({"config": ConfigRecord({"number": number})}), 100 + number, kind)
    message.metadata.__dict__["_message_id"] = f"message {number}"
    return message


def context(number: int) -> Context:
    return Context(7, 100 + number, {"partition-id": number}, RecordDict(), {})


def answers(messages: list[Message], contexts: list[Context]) -> list[Message]:
    """Reply with the partition and the number of messages of the call."""
    return [
        Message(
            RecordDict(
                {"facts": ConfigRecord({"is": context.node_config["partition-id"], "of": len(messages)})}
            ),
            reply_to=message,
        )
        for message, context in zip(messages, contexts, strict=True)
    ]


def facts(reply: Message) -> dict[str, Any]:
    return dict(reply.content["facts"])


def test_flower_calls_the_handler_with_one_message_at_a_time() -> None:
    """Flower's runtimes call an app like this, on SuperNodes and under launch."""
    app = ClientApp()
    assert train_many(app)(answers) is answers, "the function itself is returned"
    flower_gpu.evaluate_many(app, "more", max_messages=3)(answers)
    assert facts(app(message(3), context(3))) == {"is": 3, "of": 1}
    assert facts(app(message(4, kind="evaluate.more"), context(4))) == {"is": 4, "of": 1}
    with pytest.raises(ValueError, match="already registered"):
        app.train()(lambda message, context: message)


def test_mods_see_single_messages() -> None:
    seen: list[int] = []

    def mod(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        seen.append(int(message.content["config"]["number"]))
        return call_next(message, context)

    app = ClientApp(mods=[mod])
    train_many(app, mods=[mod])(answers)
    assert facts(app(message(5), context(5))) == {"is": 5, "of": 1}
    assert seen == [5, 5]


def test_simulations_use_the_handler_only_if_no_other_code_has_to_run() -> None:
    def mod(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        return call_next(message, context)

    def make_app(*, app_mods: list[Any], mods: list[Any] | None = None) -> ClientApp:
        app = ClientApp(mods=app_mods)
        train_many(app, mods=mods, max_messages=5)(answers)
        flower_gpu.evaluate_many(app, "more")(answers)
        app.query()(lambda message, context: message)
        return app

    app = make_app(app_mods=[])
    assert find_handler(app, "train") == find_handler(app, "train.default") == ManyHandler(answers, 5)
    assert find_handler(app, "evaluate.more") == ManyHandler(answers, 64)
    for kind in ("query", "evaluate", "train.more"):
        assert find_handler(app, kind) is None
    # A simulation runs the app in a worker, where gpu_mod has nothing to do.
    assert find_handler(make_app(app_mods=[gpu_mod], mods=[gpu_mod(num_gpus=0.5)]), "train") is not None
    assert find_handler(make_app(app_mods=[], mods=[mod]), "train") is None
    assert find_handler(make_app(app_mods=[mod, gpu_mod]), "train") is None
    assert find_handler(ClientApp(lambda context: None), "train") is None

    @app.lifespan()
    def lifespan(context: Context) -> Iterator[None]:
        yield

    assert find_handler(app, "train") is None


def test_the_handler_of_a_notebooks_app_survives_pickling() -> None:
    app = ClientApp(mods=[gpu_mod])
    train_many(app)(lambda messages, contexts: answers(messages, contexts))
    again = cloudpickle.loads(cloudpickle.dumps(app))
    handler = find_handler(again, "train")
    assert handler is not None
    replies = handler([message(1), message(2)], [context(1), context(2)])
    assert [facts(reply) for reply in replies] == [{"is": 1, "of": 2}, {"is": 2, "of": 2}]


def test_a_handler_may_reply_with_errors_to_some_messages() -> None:
    def some(messages: list[Message], contexts: list[Context]) -> list[Message]:
        replies = answers(messages, contexts)
        replies[1] = Message(Error(7, "no data"), reply_to=messages[1])
        return replies

    replies = ManyHandler(some, 64)([message(number) for number in range(3)], list(map(context, range(3))))
    assert [reply.has_error() for reply in replies] == [False, True, False]
    assert replies[1].error.reason == "no data"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda messages, contexts: None, "returned nothing, not a list of replies"),
        (lambda messages, contexts: messages[0], "returned a Message, not a list of replies"),
        (lambda messages, contexts: iter(answers(messages, contexts)), "returned a generator|list_iterator"),
        (lambda messages, contexts: answers(messages, contexts)[:2], "returned 2 replies to 3 messages"),
        (lambda messages, contexts: [], "returned 0 replies to 3 messages"),
        (lambda messages, contexts: answers(messages, contexts) * 2, "returned 6 replies to 3 messages"),
        (
            lambda messages, contexts: answers(messages, contexts)[::-1],
            r"in another order: replies\[0\] answers messages\[2\]",
        ),
        (
            lambda messages, contexts: [answers(messages, contexts)[0]] * 3,
            r"in another order: replies\[1\] answers messages\[0\]",
        ),
        (lambda messages, contexts: [*answers(messages, contexts)[:2], 3], r"replies\[2\] .* a int, not a M"),
        (lambda messages, contexts: messages, r"replies\[0\] .* the message that it was given"),
        (
            lambda messages, contexts: [
                *answers(messages, contexts)[:2],
                *answers([message(9)], [context(9)]),
            ],
            r"replies\[2\] .* a Message that is not a reply to it",
        ),
    ],
)
def test_invalid_replies_are_refused(function: Any, text: str) -> None:
    with pytest.raises(InvalidResultError, match=text):
        ManyHandler(function, 64)([message(number) for number in range(3)], list(map(context, range(3))))


def test_changing_one_message_leaves_the_others_unchanged() -> None:
    """The messages of a round arrive with shared records. Only arrays stay shared, as they are immutable."""
    arrays = ArrayRecord([np.zeros(3)])
    shared = RecordDict({"arrays": arrays, "config": ConfigRecord({"number": 0})})

    def changes(messages: list[Message], contexts: list[Context]) -> list[Message]:
        for message, context in zip(messages, contexts, strict=True):
            assert message.content["config"]["number"] == 0
            message.content["config"]["number"] = 7
            message.content["arrays"]["0"].numpy()[:] += 1
            context.state["own"] = ConfigRecord({"is": context.node_config["partition-id"]})
        return answers(messages, contexts)

    messages = [message(number, shared) for number in range(3)]
    handled = run_many(
        ManyHandler(changes, 64), messages, list(map(context, range(3))), message_call.identity()
    )
    assert [facts(reply) for reply, _ in handled] == [{"is": number, "of": 3} for number in range(3)]
    assert [state["own"]["is"] for _, state in handled] == [0, 1, 2]
    assert shared["config"]["number"] == 0 and not arrays["0"].numpy().any()


def test_each_message_has_its_own_seed() -> None:
    seeded, unseeded = message(1), message(2)
    seed_message(seeded, (5 << 32) + 3)
    assert flower_gpu.message_seed(seeded) == flower_gpu.message_seed(seeded) == 3
    random.seed(1)
    drawn = flower_gpu.message_seed(unseeded)
    random.seed(1)
    assert flower_gpu.message_seed(unseeded) == drawn != flower_gpu.message_seed(unseeded)
    np.random.seed(drawn)  # raises an error for more than 32 bits


def test_invalid_registrations_are_refused() -> None:
    app = ClientApp()
    with pytest.raises(ConfigError, match="max_messages of train_many"):
        train_many(app, max_messages=0)
    wrong: Any = answers
    with pytest.raises(TypeError, match=r"write @flower_gpu.evaluate_many\(app\)"):
        flower_gpu.evaluate_many(wrong)


def test_a_worker_of_gpu_mod_calls_the_handler_with_one_message() -> None:
    """The fork server finds the handler by name in the app's module, where the name is the plain function."""
    app = ClientApp(mods=[gpu_mod(start_method="forkserver", gpu="never")])
    train_many(app)(answers)
    assert facts(app(message(6), context(6))) == {"is": 6, "of": 1}
