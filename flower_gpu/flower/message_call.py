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
from flower_gpu.workers import call_end
from flower_gpu.workers.call import Call
from flower_gpu.workers.call_end import Outcome
from flower_gpu.workers.confined_replies import PlainBytes
from flower_gpu.workers.own_process import facts

#: Key of a node config: which part of the data a client has.
PARTITION_KEY = "partition-id"

#: What handling a message gives: the reply and the state, or the bytes of both from a confined worker.
Handled = tuple[Message, RecordDict] | PlainBytes
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
    workers: Workers | None = None,
) -> Message:
    """Have a worker handle a message, and take over its changes of the context's state.

    ``task``: ``task(*args, message, context, identity)`` runs in the worker and returns what :func:`run`
    does. ``args``: its first arguments.
    ``message``, ``context``: as Flower hands them to an app.
    ``settings``: returns how the call is to run; its errors are those of the call.
    ``name``: of the user's function, by which the footprint is known.
    ``workers``: as for :func:`flower_gpu.calls.runner.run_call`.
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
            workers=workers,
            **_described(message),
        )
        if found.worker.confinement is not None:
            reply, state = record_bytes.decode_reply(value, message)
        else:
            reply, state = value
    take_over(context.state, state)
    return reply


def call_batch(
    task: Callable[..., list[Outcome]],
    args: tuple[Any, ...],
    visits: Sequence[tuple[int, Message, Context]],
    settings: CallSettings,
    *,
    name: str,
    workers: Workers,
) -> list[Message | BaseException]:
    """Have a worker handle messages of one kind together, and take over its changes of the contexts' states.

    ``task``: ``task(*args, visits, identity)`` runs in the worker and returns the outcome of each message.
    ``visits``: the seed, the message and the context of each.
    ``settings``: of one call. A batch has the time that its messages have together, and a footprint for each
    power of two of them.
    Returns each reply, or why there is none; what has failed for all of them is the error of each.
    """
    kind, count = visits[0][1].metadata.message_type, len(visits)
    clients = [client_of(context) for *_, context in visits]
    client = f"{clients[0]} and {count - 1} others"
    timeout_s = settings.worker.timeout_s
    found: list[Message | BaseException] = []
    try:
        outcomes = run_call(
            task,
            (*args, visits, identity()),
            settings=settings.with_worker(name=client, timeout_s=timeout_s and timeout_s * count),
            name=f"{name} x{1 << (count - 1).bit_length()}",
            workers=workers,
            clients=clients,
            **_described(visits[0][1]),
        )
    except FlowerGPUError as error:
        text = str(error).removeprefix(f"{kind} of client {client}: ")
        for client in clients:
            again = copy(error)
            again.args = (shortened(f"{kind} of client {client}: in a batch of {count}: {text}"),)
            again.__cause__ = error.__cause__
            found.append(again)
        return found
    for client, (_, _, context), outcome in zip(clients, visits, outcomes, strict=True):
        label = f"{kind} of client {client}"
        try:
            with _named(label):
                reply, state = call_end.unwrap(Call(task, label=label), outcome)
            take_over(context.state, state)
            found.append(reply)
        except Exception as error:
            found.append(error)
    return found


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
    """Handle a message, by an app or a function of one; runs in a worker.

    ``identity``: who the caller is for Flower, see :func:`identity`. Returns the reply and the state; in a
    confined worker as :func:`flower_gpu.flower.record_bytes.encode_reply` writes them.
    """
    assume(identity)
    checked = checker(message)  # before the function can change it
    reply = checked(function(message, context))
    check_texts(context.state, "context.state")
    if facts.confinement is None:
        return reply, context.state
    return record_bytes.encode_reply(reply, context.state)


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
