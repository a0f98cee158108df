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

#: Key of a node config: which part of the data a client has.
PARTITION_KEY = "partition-id"

#: The reply to a message, and the state of the client after it.
Replied = tuple[Message, RecordDict]
#: The same, or the bytes of both from a confined worker.
Handled = Replied | PlainBytes
#: What of Flower's ``TaskIdentity`` a worker needs.
IDENTITY: Final = ("_task_id", "_run_id", "_node_id")
_SHOWN_CHARACTERS: Final = 200  # of a text in an error


def call(
    task: Callable[..., Handled],
    args: tuple[Any, ...],
    message: Message,
    context: Context,
    settings: Callable[[], CallSettings],
    *,
    name: str,
) -> Message:
    """Have a worker handle a message, and take over its changes of the context's state.

    ``task``: ``task(*args, message, context, identity)`` runs in the worker and returns what :func:`run`
    does. ``args``: its first arguments.
    ``message``, ``context``: as Flower hands them to an app.
    ``settings``: returns how the call is to run; its errors are those of the call.
    ``name``: of the user's function, by which the footprint is known.
    Returns the reply.
    Raises FlowerGPUError if there was no GPU or worker for it, or the function failed; the text names the
    client. Raises LoadClientAppError as it is.
    """
    kind = message.metadata.message_type
    with _named(f"{kind} of client {client_of(context)}"):
        found = settings()
    reply: Message
    with _named(f"{kind} of client {found.worker.name}"):
        value = run_call(
            task,
            (*args, message, context, identity()),
            settings=found,
            name=name,
            **_described(message),
        )
        if found.worker.confinement is not None:
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
    settings: Callable[[], CallSettings],
    *,
    name: str,
    workers: Workers,
) -> list[Message]:
    """Have a worker handle messages of one type and round, and take over its changes of the contexts' states.

    ``task``: ``task(*args, messages, contexts, identity)`` runs in the worker and returns the reply and the
    state of each message.
    ``settings``: as for :func:`call`, of one message. Several messages have the time limit of all of them
    together, and a footprint for each power of two of their number.
    ``workers``: as for :func:`flower_gpu.calls.runner.run_call`.
    Returns the replies. Raises as :func:`call` does; the text names the first client and counts the others.
    """
    kind, count = messages[0].metadata.message_type, len(messages)
    clients = [client_of(context) for context in contexts]
    label = label_of(kind, contexts)
    with _named(label):
        found = settings()
        timeout_s = found.worker.timeout_s
        handled = run_call(
            task,
            (*args, messages, contexts, identity()),
            settings=found.with_worker(name=_names(clients), timeout_s=timeout_s and timeout_s * count),
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
        own = copy(error)
        own.args = (shortened(f"{message_type} of client {client}: {text}\n{advice}"),)
        own.__cause__ = error.__cause__
        errors.append(own)
    return errors


def _names(clients: Sequence[str]) -> str:
    return f"{clients[0]}{and_others(len(clients) - 1)}"


def label_of(message_type: str, contexts: Sequence[Context]) -> str:
    """Return the name of a call in texts, such as ``train of client 3 and 2 others``."""
    return f"{message_type} of client {_names([client_of(context) for context in contexts])}"


@contextmanager
def _named(label: str) -> Iterator[None]:
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
    return (reply, state) if facts.confinement is None else record_bytes.encode_reply(reply, state)


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
    """Be for Flower who the caller is."""
    for key, value in identity.items():
        setattr(TaskIdentity, key, value)


def checker(message: Message) -> Callable[[Any], Message]:
    """Return what checks and returns the reply to a message, which its function may change meanwhile.

    It raises InvalidResultError if it gets no reply to it: nobody takes that, and the server waits for ever.
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
            what = "the message that it was given" if reply is message else "a Message that is no reply to it"
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

    Protobuf takes no lone surrogates. Flower notices that after the app has ended, and tells the server
    nothing.
    """
    for name, record in records.items():
        for key, value in record.items():
            for text in (name, key, *(value if isinstance(value, list) else [value])):
                if isinstance(text, str) and encodable(text) != text:
                    raise InvalidResultError(
                        f"{what} cannot be sent: {shortened(text, _SHOWN_CHARACTERS)!r}, in the record "
                        f"{encodable(name)!r}, is no valid Unicode. A file name that is not UTF-8 becomes "
                        "valid with os.fsencode(name).decode(errors='replace')"
                    )


def take_over(state: RecordDict, new: RecordDict) -> None:
    """Change a state into another one, in place: other mods may hold it, or records of it."""
    if state is new:
        return
    held = [id(record) for record in state.values()]
    record: Any
    records: dict[str, Any] = {}
    for name, record in new.items():
        old: Any = state.get(name)
        # One that is there under two names may be two different ones from now on.
        if type(old) is type(record) and held.count(id(old)) == 1:
            for key in list(old):  # clear() of Flower's records takes the square of their number
                del old[key]
            old.update(record)
            records[name] = old
        else:
            records[name] = record
    state.clear()  # and not only what is no more: their order may be another one
    state.update(records)


def client_of(context: Context) -> str:
    """Return the name of the client whose context this is: its partition, else its node."""
    partition = context.node_config.get(PARTITION_KEY)
    return str(context.node_id if partition is None else partition)
