"""The worker's side of :func:`flower_gpu.gpu_mod`, and what of a ``Context`` comes back from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.supercore.task_identity import TaskIdentity

from flower_gpu.errors import InvalidResultError
from flower_gpu.flower import arrays as arrays  # the reply and the state hold Flower's Array

_IDENTITY = ("_task_id", "_run_id", "_node_id")


def run(
    function: ClientAppCallable,
    message: Message,
    context: Context,
    identity_: Mapping[str, Any],
    lifespan: Callable[[Context], AbstractContextManager[None]] | None,
) -> tuple[Message, RecordDict]:
    """Handle a message; runs in a worker.

    Parameters
    ----------
    function : callable
        What follows in the chain of mods: the rest of it, or the app's own function.
    message, context
        What it gets.
    identity_ : mapping
        From :func:`identity` in the caller.
    lifespan : callable, optional
        The app's lifespan, where this process has not inherited what it did in the caller.

    Returns
    -------
    tuple of Message and RecordDict
        The reply and the state.
    """
    for name, value in identity_.items():
        setattr(TaskIdentity, name, value)
    with nullcontext() if lifespan is None else lifespan(context):
        reply = function(message, context)
    if not isinstance(reply, Message):
        raise InvalidResultError(f"the function returned a {type(reply).__name__}, not a Message")
    return reply, context.state


def identity() -> dict[str, Any]:
    """Return who this process is for Flower: without that no message can be made."""
    return {name: getattr(TaskIdentity, name) for name in _IDENTITY}


def take_over(state: RecordDict, new: RecordDict) -> None:
    """Change a state into another one, in place: other mods may hold it, or records of it."""
    if state is new:
        return
    for name in [name for name in state if name not in new]:
        del state[name]
    record: Any
    for name, record in new.items():
        old: Any = state.get(name)
        if type(old) is type(record):
            old.clear()
            old.update(record)
        else:
            state[name] = record
