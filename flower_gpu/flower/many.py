"""Handlers that take several messages at once: ``train_many``, ``evaluate_many``, and the seed of a message.

Flower calls a handler with one message. ``simulate`` looks for a handler of this module, and calls it with
several messages of a round. Everywhere else the function that is registered with Flower makes lists of one::

    Flower ──────── one(message, context) ──┐
                                            ├──> ManyHandler ──> the app's function(messages, contexts)
    simulate ───── run_many(messages) ──────┘

A mod and a lifespan function are written for one message. An app with one of them therefore gets lists of
one in ``simulate``, too. ``gpu_mod`` is the exception, because it does nothing in a worker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, TypeVar

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from flower_gpu.errors import InvalidResultError
from flower_gpu.flower import message_call
from flower_gpu.flower.mod import function_without_mods
from flower_gpu.flower.records import records_in
from flower_gpu.kinds import COUNT

Handler = Callable[[list[Message], list[Context]], list[Message]]
H = TypeVar("H", bound=Handler)

_DEFAULT: Final = "default"  # Flower's name for the action of a handler without one
_MAX_MESSAGES: Final = 64
_HANDLER: Final = "_flower_gpu_handler"  # attribute of the function registered with Flower
_SEED: Final = "_flower_gpu_seed"  # attribute of a message
_SEED_BITS: Final = 32  # as many as numpy.random.seed and scikit-learn accept


@dataclass(frozen=True)
class ManyHandler:
    """The handler of an app for several messages.

    ``function``: the app's own.
    ``max_messages``: maximum number of messages in one call.
    """

    function: Handler
    max_messages: int

    def __call__(self, messages: Sequence[Message], contexts: Sequence[Context]) -> list[Message]:
        """Handle messages and return their replies, in the same order.

        Raises InvalidResultError if the function returns anything else.
        """
        ids = [message.metadata.message_id for message in messages]
        checks = [message_call.checker(message) for message in messages]  # the function may change them
        replies: Any = self.function([*messages], [*contexts])
        if not isinstance(replies, list | tuple):
            what = "nothing" if replies is None else f"a {type(replies).__name__}"
            raise InvalidResultError(f"{self._name} returned {what}, not a list of replies. {_ADVICE}")
        if len(replies) != len(messages):
            raise InvalidResultError(
                f"{self._name} returned {_count(len(replies), 'reply', 'replies')} to "
                f"{_count(len(messages), 'message', 'messages')}. {_ADVICE}"
            )
        return [self._checked(place, reply, ids, checks[place]) for place, reply in enumerate(replies)]

    def _checked(
        self, place: int, reply: Any, ids: Sequence[str], check: Callable[[Any], Message]
    ) -> Message:
        answered = reply.metadata.reply_to_message_id if isinstance(reply, Message) else ""
        if answered in ids and answered != ids[place]:
            raise InvalidResultError(
                f"{self._name} returned replies in another order: replies[{place}] answers "
                f"messages[{ids.index(answered)}]. {_ADVICE}"
            )
        try:
            return check(reply)
        except InvalidResultError as error:
            raise InvalidResultError(f"replies[{place}] of {self._name}: {error}") from error

    @property
    def _name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)


_ADVICE: Final = "Return one Message for each message, in the order of the messages"


def train_many(
    app: ClientApp,
    action: str = _DEFAULT,
    *,
    mods: list[Mod] | None = None,
    max_messages: int = _MAX_MESSAGES,
) -> Callable[[H], H]:
    """Register a train function that handles several messages at once.

    For small models: :func:`flower_gpu.simulate` passes several messages of a round to one call, so that the
    function can train their models together, for example with ``torch.func.vmap``. Flower's own runtimes,
    SuperNodes and deterministic runs pass lists of one message. So do simulations in which clients differ in
    their resources, and apps that have other mods than ``gpu_mod`` or a lifespan function.

    Parameters
    ----------
    app : ClientApp
        The app, which then has no ``app.train()`` for this action.
    action : str
        As for ``app.train``: messages of the type ``"train.<action>"`` go to this function.
    mods : list of mods, optional
        As for ``app.train``.
    max_messages : int
        Maximum number of messages in one call. Simulations measure how many pay off.

    Returns
    -------
    callable
        A decorator for ``function(messages, contexts) -> replies``, which returns the function unchanged. The
        function gets two lists of the same length and returns one reply for each message, in their order. It
        may return ``Message(Error(...), reply_to=message)`` for some. An exception fails all of them.

    Raises
    ------
    ConfigError
        If ``max_messages`` is less than 1.
    ValueError
        If the app has a train function for this action already.

    Examples
    --------
    >>> @flower_gpu.train_many(app)
    ... def train(messages: list[Message], contexts: list[Context]) -> list[Message]: ...
    """
    return _registers("train_many", app, "train", action, mods, max_messages)


def evaluate_many(
    app: ClientApp,
    action: str = _DEFAULT,
    *,
    mods: list[Mod] | None = None,
    max_messages: int = _MAX_MESSAGES,
) -> Callable[[H], H]:
    """Register an evaluate function that handles several messages at once; otherwise as :func:`train_many`.

    Examples
    --------
    >>> @flower_gpu.evaluate_many(app)
    ... def evaluate(messages: list[Message], contexts: list[Context]) -> list[Message]: ...
    """
    return _registers("evaluate_many", app, "evaluate", action, mods, max_messages)


def message_seed(message: Message) -> int:
    """Return the seed for the random numbers of one message.

    A call for several messages has to give each its own random numbers. In :func:`flower_gpu.simulate` this
    seed follows from the run's seed, the client and the round. It is the same however many messages are
    handled together, and in every run with the same seed. Elsewhere it is drawn from Python's ``random``.

    Parameters
    ----------
    message : Message
        A message that the function was given.

    Returns
    -------
    int
        A number of 32 bits, which the generators of all libraries accept.

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(flower_gpu.message_seed(message))
    >>> order = torch.randperm(len(labels), generator=generator)
    """
    seed = vars(message).get(_SEED)
    return random.getrandbits(_SEED_BITS) if seed is None else int(seed)


def seed_message(message: Message, seed: int) -> None:
    """Set what :func:`message_seed` returns for a message: the lowest bits of ``seed``."""
    vars(message)[_SEED] = seed & (1 << _SEED_BITS) - 1


def find_handler(app: ClientApp, message_type: str) -> ManyHandler | None:
    """Return an app's handler of this module for messages of a type, or None if these come one by one."""
    handler: ManyHandler | None = getattr(function_without_mods(app, message_type), _HANDLER, None)
    return handler


def run_many(
    handler: ManyHandler,
    messages: Sequence[Message],
    contexts: Sequence[Context],
    identity: Mapping[str, Any],
) -> list[message_call.Replied]:
    """Handle several messages; runs in a worker. Return each reply with the state of its context.

    ``identity``: as for :func:`flower_gpu.flower.message_call.replied`.
    """
    message_call.assume(identity)
    replies = handler([_with_own_records(message) for message in messages], contexts)
    for context in contexts:
        message_call.check_texts(context.state, "context.state")
    return [(reply, context.state) for reply, context in zip(replies, contexts, strict=True)]


def _with_own_records(message: Message) -> Message:
    """Return a copy of the message with its own records.

    Messages of a round arrive with the same records, and changes of one must not show in the others. Arrays
    stay shared, because they hold immutable bytes.
    """
    copied = copy(message)
    if message.has_content():
        records = records_in(message, ArrayRecord).values()
        shared = {id(array): array for record in records for array in record.values()}
        copied.content = deepcopy(message.content, shared)
    return copied


def _registers(
    name: str, app: ClientApp, category: str, action: str, mods: list[Mod] | None, max_messages: int
) -> Callable[[H], H]:
    if not isinstance(app, ClientApp):
        raise TypeError(f"{name} needs the ClientApp: write @flower_gpu.{name}(app)")
    COUNT.check(max_messages, f"max_messages of {name}")
    register = getattr(app, category)(action, mods=mods)

    def decorator(function: H) -> H:
        register(_for_one(ManyHandler(function, max_messages)))
        return function

    return decorator


def _for_one(handler: ManyHandler) -> ClientAppCallable:
    """Return the function for Flower, which calls it with one message."""

    # With the app's function in `__wrapped__`, where the imports of a notebook's functions are looked for.
    @wraps(handler.function)
    def handle_single(message: Message, context: Context) -> Message:
        return handler([message], [context])[0]

    setattr(handle_single, _HANDLER, handler)
    return handle_single


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"
