"""One message to a ``ClientApp``, handled in a worker: the caller's side and the worker's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Final

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.typing import ClientAppCallable
from flwr.supercore.task_identity import TaskIdentity

from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import CallSettings
from flower_gpu.calls.tries import Workers
from flower_gpu.errors import (
    ClientCallError,
    FlowerGPUError,
    InvalidResultError,
    encodable,
    shortened,
    text_of,
)
from flower_gpu.flower import record_bytes
from flower_gpu.flower.records import records_in, round_of
from flower_gpu.printable import and_others
from flower_gpu.workers.confined_replies import PlainBytes
from flower_gpu.workers.own_process import facts

#: Key of a node config for the part of the data that a client has.
PARTITION_KEY = "partition-id"

#: The reply to a message, and the state of the client after it.
Replied = tuple[Message, RecordDict]
#: The same, or the bytes of both from a confined worker.
Handled = Replied | PlainBytes
#: Attributes of Flower's ``TaskIdentity`` that a worker needs.
IDENTITY: Final = ("_task_id", "_run_id", "_node_id")
_SHOWN_CHARACTERS: Final = 200  # of a text in an error


def call(
    task: Callable[..., Handled],
    args: tuple[Any, ...],
    message: Message,
    context: Context,
    settings: CallSettings,
    *,
    name: str,
) -> Message:
    """Handle a message in a worker, apply its changes of the context's state, and return the reply.

    ``task``: ``task(*args, message, context, identity)`` runs in the worker. It returns the same as
    :func:`run`.
    ``args``: first arguments of the task.
    ``message``, ``context``: as Flower passes them to an app.
    ``settings``: settings of the call.
    ``name``: name of the user's function, which is the key of the footprint.
    Raises FlowerGPUError if no GPU or worker was available, or if the function failed. The text names the
    client. A LoadClientAppError is raised unchanged.
    """
    reply: Message
    with named(f"{message.metadata.message_type} of client {settings.worker.name}"):
        value = run_call(
            task,
            (*args, message, context, identity()),
            settings=settings,
            name=name,
            **_described(message),
        )
        if settings.worker.confinement is not None:
            reply, state = record_bytes.decode_reply(value, message)
        else:
            reply, state = value
    take_over(context.state, state)
    return reply


def call_many(
    task: Callable[..., list[Replied]],
    args: tuple[Any, ...],
    messages: Sequence[Message],
    contexts: Sequence[Context],
    settings: CallSettings,
    *,
    name: str,
    workers: Workers,
) -> list[Message]:
    """Handle messages of the same type and round in a worker, and return the replies.

    The worker's changes of the contexts' states are applied.

    ``task``: ``task(*args, messages, contexts, identity)`` runs in the worker and returns the reply and the
    state of each message.
    ``settings``: settings of the call of one message. Several messages have the time limit of all of them
    together, and a footprint for each power of two of their number.
    ``workers``: as for :func:`flower_gpu.calls.runner.run_call`.
    Raises the errors of :func:`call`; the text names the first client and counts the others.
    """
    kind, count = messages[0].metadata.message_type, len(messages)
    clients = [client_of(context) for context in contexts]
    label = label_of(kind, contexts)
    with named(label):
        timeout_s = settings.worker.timeout_s
        handled = run_call(
            task,
            (*args, messages, contexts, identity()),
            settings=settings.with_worker(name=_names(clients), timeout_s=timeout_s and timeout_s * count),
            name=name if count == 1 else f"{name} x{1 << (count - 1).bit_length()}",
            workers=workers,
            clients=clients if count > 1 else (),
            **_described(messages[0]),
        )
    for context, (_, state) in zip(contexts, handled, strict=True):
        take_over(context.state, state)
    return [reply for reply, _ in handled]


def errors_of_each(
    error: BaseException, message_type: str, contexts: Sequence[Context]
) -> list[BaseException]:
    """Return what an error of :func:`call_many` is for each client: the same, with that client's name."""
    clients = [client_of(context) for context in contexts]
    if len(clients) == 1 or not isinstance(error, FlowerGPUError):
        return [error] * len(clients)
    text = str(error).removeprefix(f"{label_of(message_type, contexts)}: ")
    advice = f"The {len(clients)} messages that were handled together have all failed"
    errors: list[BaseException] = []
    for client in clients:
        shortened_error = copy(error)
        shortened_error.args = (shortened(f"{message_type} of client {client}: {text}\n{advice}"),)
        shortened_error.__cause__ = error.__cause__
        errors.append(shortened_error)
    return errors


def _names(clients: Sequence[str]) -> str:
    return f"{clients[0]}{and_others(len(clients) - 1)}"


def label_of(message_type: str, contexts: Sequence[Context]) -> str:
    """Return the name of a call in texts, such as ``train of client 3 and 2 others``."""
    return f"{message_type} of client {_names([client_of(context) for context in contexts])}"


@contextmanager
def named(label: str) -> Iterator[None]:
    """Have errors name the client: Flower tells the server nothing but their text."""
    try:
        yield
    except FlowerGPUError as error:
        name = f"{LoadClientAppError.__module__}.{LoadClientAppError.__name__}"
        if getattr(error, "error_type", "") == name:  # from a confined worker only its name and text come
            raise LoadClientAppError(str(error)) from error
        text = str(error)
        named = shortened(text if label in text else f"{label}: {text}")
        if named != text:
            error.args = (named,)
        raise
    except LoadClientAppError:
        raise
    except Exception as error:
        raise ClientCallError(f"{label}: {text_of(error)}") from error


def _described(message: Message) -> dict[str, Any]:
    """Return what a call is told of its message."""
    records = records_in(message, ArrayRecord).values()
    configs = records_in(message, ConfigRecord).values()
    return {
        "kind": message.metadata.message_type,
        "arrays": [array for record in records for array in record.values()],
        "config": {key: value for record in configs for key, value in record.items()},
        "server_round": round_of(message),
    }


def run(
    function: ClientAppCallable, message: Message, context: Context, identity: Mapping[str, Any]
) -> Handled:
    """Handle a message as :func:`replied` does, also in a confined worker.

    Returns the reply and the state; in a confined worker as
    :func:`flower_gpu.flower.record_bytes.encode_reply` writes them.
    """
    reply, state = replied(function, message, context, identity)
    return record_bytes.encode_reply(reply, state) if facts.is_confined else (reply, state)


def replied(
    function: ClientAppCallable, message: Message, context: Context, identity: Mapping[str, Any]
) -> Replied:
    """Handle a message, by an app or a function of one; runs in a worker.

    ``identity``: who the caller is for Flower, see :func:`identity`.
    """
    assume(identity)
    checked = checker(message)  # before the function can change it
    reply = checked(function(message, context))
    check_texts(context.state, "context.state")
    return reply, context.state


def identity() -> dict[str, Any]:
    """Return who this process is for Flower: without that a worker cannot make a message."""
    return {key: getattr(TaskIdentity, key) for key in IDENTITY}


def assume(identity: Mapping[str, Any]) -> None:
    """Set Flower's identity of this process to the caller's identity."""
    for key, value in identity.items():
        setattr(TaskIdentity, key, value)


def checker(message: Message) -> Callable[[Any], Message]:
    """Return a function that checks the reply to a message and returns it.

    Create it before the app's function runs, because that may change the message. The check raises
    InvalidResultError if its argument is not a reply to the message. Without the check, such a result would
    be dropped and the server would wait for ever.
    """
    asked = message.metadata
    expected = asked.message_id, asked.dst_node_id, asked.src_node_id

    def checked(reply: Any) -> Message:
        if not isinstance(reply, Message):
            what = "nothing" if reply is None else f"a {type(reply).__name__}"
            raise InvalidResultError(
                f"the function returned {what}, not a Message: end it with "
                "return Message(content, reply_to=message)"
            )
        metadata = reply.metadata
        if expected != (metadata.reply_to_message_id, metadata.src_node_id, metadata.dst_node_id):
            what = (
                "the message that it was given" if reply is message else "a Message that is not a reply to it"
            )
            raise InvalidResultError(
                f"the function returned {what}: return Message(content, reply_to=message), with the message "
                "that the function was given"
            )
        if reply.has_content() == reply.has_error():
            raise InvalidResultError("the function returned a Message without content and without error")
        if reply.has_content():
            check_texts(reply.content, "the reply")
            return reply
        reason = reply.error.reason or ""
        if (kept := shortened(reason)) != reason:
            return Message(Error(reply.error.code, kept), reply_to=message)
        return reply

    return checked


def check_texts(records: RecordDict, what: str) -> None:
    """Check that Flower can send the texts of records; raises InvalidResultError.

    Protobuf refuses lone surrogates. Flower notices them only after the app has ended, and does not inform
    the server.
    """
    for name, record in records.items():
        for key, value in record.items():
            for text in (name, key, *(value if isinstance(value, list) else [value])):
                if isinstance(text, str) and encodable(text) != text:
                    raise InvalidResultError(
                        f"{what} cannot be sent: {shortened(text, _SHOWN_CHARACTERS)!r}, in the record "
                        f"{encodable(name)!r}, is not valid Unicode. A file name that is not UTF-8 becomes "
                        "valid with os.fsencode(name).decode(errors='replace')"
                    )


def take_over(state: RecordDict, new: RecordDict) -> None:
    """Replace the content of a state, in place, because other mods may hold the state or its records."""
    if state is new:
        return
    record_ids = [id(record) for record in state.values()]
    record: Any
    records: dict[str, Any] = {}
    for name, record in new.items():
        old: Any = state.get(name)
        # A record under two names is not reused, because the new state may have two different records there.
        if type(old) is type(record) and record_ids.count(id(old)) == 1:
            # Not by clear(): the time of Flower's clear() grows with the square of the number of entries.
            for key in list(old):
                del old[key]
            old.update(record)
            records[name] = old
        else:
            records[name] = record
    state.clear()  # removes all records, because their order may have changed
    state.update(records)


def client_of(context: Context) -> str:
    """Return the name of a context's client: its partition, otherwise its node."""
    partition = context.node_config.get(PARTITION_KEY)
    return str(context.node_id if partition is None else partition)
