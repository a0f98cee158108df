"""One message to a ``ClientApp``, handled in a worker under a lease: what :func:`gpu_mod` and SuperNodes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import Context, Message, RecordDict

from flower_gpu.calls.options import CallSettings
from flower_gpu.errors import ClientCallError, FlowerGPUError
from flower_gpu.flower import arrays as arrays  # messages and contexts hold Flower's Array
from flower_gpu.flower import mod_call
from flower_gpu.runner import run_call

_PARTITION = "partition-id"


def call(
    task: Callable[..., tuple[Message, RecordDict]],
    args: tuple[Any, ...],
    message: Message,
    context: Context,
    settings: Callable[[], CallSettings],
    *,
    name: str,
    passed: tuple[type[Exception], ...] = (),
) -> Message:
    kind = message.metadata.message_type
    # Flower tells the server nothing but an error's text: not which of the clients it was.
    label = f"{kind} of client {client_of(context)}"
    records = message.content.array_records.values() if message.has_content() else ()
    try:
        found = settings()
        label = f"{kind} of client {found.worker.name}"
        reply: Message
        reply, state = run_call(
            task,
            (*args, message, context, mod_call.identity()),
            settings=found,
            kind=kind,
            name=name,
            arrays=[array for record in records for array in record.values()],
            config=_config(message),
        )
    except FlowerGPUError as error:
        if label not in str(error):
            error.args = (f"{label}: {error}",)
        raise
    except passed:
        raise
    except Exception as error:
        raise ClientCallError(f"{label}: {_text(error)}") from error
    mod_call.take_over(context.state, state)
    return reply


def client_of(context: Context) -> str:
    """Return the name of the client whose context this is: its partition, else its node."""
    partition = context.node_config.get(_PARTITION)
    return str(context.node_id if partition is None else partition)


def _config(message: Message) -> dict[str, Any]:
    records = message.content.config_records.values() if message.has_content() else ()
    return {key: value for record in records for key, value in record.items()}


def _text(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ failed
        return type(error).__name__
