"""``vectorized``: a training function of pure PyTorch that several clients run as one batch of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from types import TracebackType
from typing import Any, Final, TypeVar, overload

from flower_gpu.errors import ConfigError
from flower_gpu.kinds import COUNT
from flower_gpu.workers import events

F = TypeVar("F", bound=Callable[..., Any])

#: The event by which a worker tells that a message's handler calls a vectorized function.
VECTORIZED: Final = "vectorized"

_MOST: Final = 64  # clients in a batch, where the function does not say
# By what torch says of a function that it cannot run for several clients: why, and what to do.
_REASONS: Final = {
    "captured Tensor": "it changes a tensor in place, as BatchNorm does with its running statistics: use "
    "GroupNorm, or track_running_stats=False",
    "randomness": "it draws random numbers: draw them before, and give them as an argument; do without "
    "Dropout, and make modules outside",
    **dict.fromkeys(("backward()", "requires_grad_()"), "it uses autograd itself: use torch.func.grad"),
    **dict.fromkeys(
        ("vmap", "functorch", "broadcast shape", "have storage"), "torch.func cannot do what it does"
    ),
}


@dataclass
class FunctionCall:
    """A client's call of a vectorized function, whose arguments are checked.

    ``most``: how many of them are a batch, at most.
    ``likeness``: what calls of one batch have in common: all but the values of tensors.
    ``value``, ``error``: what :func:`answer` has found.
    """

    function: Callable[..., Any]
    most: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    likeness: list[Any] = field(init=False)
    value: Any = None
    error: tuple[BaseException, TracebackType | None] | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError if an argument is neither a tensor nor a plain value."""
        import torch
        from torch.utils import _pytree

        self.values, self.structure = _pytree.tree_flatten(self.arguments)
        self.likeness = [self.function, self.structure]
        for value in self.values:
            if isinstance(value, torch.Tensor):
                self.likeness.append((value.shape, value.dtype, value.device))
            elif value is None or isinstance(value, int | float | str | torch.dtype | torch.device):
                self.likeness.append((type(value), value))
            else:
                raise ConfigError(
                    f"{self.function.__qualname__} is vectorized, and a {type(value).__name__} is among its "
                    "arguments: give it tensors and plain values. Of a module give "
                    "dict(model.named_parameters()), and have the module itself in a global, for "
                    "torch.func.functional_call"
                )

    def result(self) -> Any:
        """Return the value, or raise the error: without the frames of calls that raised it before."""
        if self.error is not None:
            raise self.error[0].with_traceback(self.error[1])
        return self.value


# Takes the calls of a thread that handles a message of a simulation, and returns their results.
_meeting: ContextVar[Callable[[FunctionCall], Any] | None] = ContextVar("flower_gpu_meeting", default=None)


@contextmanager
def meeting(meet: Callable[[FunctionCall], Any] | None) -> Iterator[None]:
    """Have ``meet`` take this thread's calls of vectorized functions in the block; None: they are plain."""
    token = _meeting.set(meet)
    try:
        yield
    finally:
        _meeting.reset(token)


@overload
def vectorized(function: F, *, batch: int = _MOST) -> F: ...
@overload
def vectorized(*, batch: int = _MOST) -> Callable[[F], F]: ...
def vectorized(function: Any = None, *, batch: int = _MOST) -> Any:
    """Have simulations call a training function once for many clients, as one batch of models.

    For small models. In :func:`flower_gpu.simulate` the messages of a round whose handlers call the function
    with arguments of the same shapes are handled together by one worker, and the function runs once for all
    of them, by ``torch.func.vmap``. Elsewhere, and in deterministic runs, it is called as it is.

    Parameters
    ----------
    function : callable
        A function at the top of a module, of pure PyTorch: its gradients are of ``torch.func``, and it
        changes no argument in place. Arguments are tensors and plain values, and dicts, lists and tuples of
        them; results too.
    batch : int
        How many clients are a batch, at most: parameters, gradients and data of all of them are in memory at
        the same time.

    Returns
    -------
    callable
        A function with the same arguments and results. In a simulation the results have no history for
        autograd.

    Raises
    ------
    ConfigError
        If ``batch`` is less than 1. When called in a simulation: if an argument cannot be part of a batch, or
        PyTorch cannot run the function for several clients; the message says why, and names the module.

    Examples
    --------
    >>> @flower_gpu.vectorized
    ... def step(parameters, images, labels):
    ...     gradients = torch.func.grad(loss)(parameters, images, labels)
    ...     return {name: value - 0.1 * gradients[name] for name, value in parameters.items()}
    """
    COUNT.check(batch, "batch of a vectorized function")
    if function is None:
        return lambda function: vectorized(function, batch=batch)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _called(function, batch, args, kwargs)

    return call


def _called(function: Callable[..., Any], batch: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    meet = _meeting.get()  # not in the decorated function: that one may travel by value, which this cannot
    return function(*args, **kwargs) if meet is None else meet(FunctionCall(function, batch, (args, kwargs)))


def answer(calls: Sequence[FunctionCall]) -> None:
    """Find the results of calls, by one run of a function for all that are alike; tell how many may be."""
    if calls:
        events.send(VECTORIZED, most=min(call.most for call in calls))
    groups: list[list[FunctionCall]] = []
    for call in calls:
        group = next((each for each in groups if each[0].likeness == call.likeness), [])
        if not group:
            groups.append(group)
        group.append(call)
    for group in groups:
        try:
            for call, value in zip(group, run_together(group), strict=True):
                call.value = value
        except Exception as error:
            for call in group:
                call.error = error, error.__traceback__


def run_together(calls: Sequence[FunctionCall]) -> list[Any]:
    """Run a function once for calls of the same likeness; return the result of each.

    Raises ConfigError if torch cannot do that; other errors of the function as they are.
    """
    import torch
    from torch.utils import _pytree

    first = calls[0]
    name = first.function.__qualname__
    places = [place for place, value in enumerate(first.values) if isinstance(value, torch.Tensor)]
    found: tuple[list[Any], Any] = [], None

    def run(*tensors: Any) -> tuple[Any, ...]:
        nonlocal found
        values = list(first.values)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = _pytree.tree_unflatten(values, first.structure)
        found = _pytree.tree_flatten(first.function(*args, **kwargs))
        return tuple(value for value in found[0] if isinstance(value, torch.Tensor))

    stacked = [torch.stack([call.values[place].detach() for call in calls]) for place in places]
    try:
        with meeting(None):
            tensors = iter(torch.func.vmap(run, randomness="error")(*stacked))
    except Exception as error:
        reason = next((reason for sign, reason in _REASONS.items() if sign in str(error)), None)
        if reason is None:
            raise
        raise ConfigError(
            f"{name} is vectorized, but cannot run for several clients at once{_because_of(error)}: "
            f"{reason}. Or remove the decorator. PyTorch says: {error}"
        ) from error
    results, structure = found
    # What no client's tensor is in has one memory for all of them, and clients may write to their results.
    rows = [
        next(tensors).contiguous() if isinstance(value, torch.Tensor) else [value] * len(calls)
        for value in results
    ]
    return [_pytree.tree_unflatten(list(row), structure) for row in zip(*rows, strict=True)]


def _because_of(error: BaseException) -> str:
    """Name the innermost module in which an error was raised."""
    import torch

    text, frames = "", error.__traceback__
    while frames is not None:
        owner = frames.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            text = f", because of {type(owner).__name__}"
        frames = frames.tb_next
    return text
