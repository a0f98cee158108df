"""Hooks that record the rounds of any Flower strategy in this process.

An app creates its strategy itself and calls ``start`` on it, or passes it to Flower's ``Server``. It need not
know of the recorder. So during a run, the base classes of Flower's strategies and its ``Server`` get a
``__getattribute__`` that returns wrappers, which call the hooks below in place of the methods. This covers
every subclass, even a class that overrides all methods and never calls ``super()``, and objects that were
created before. Calls by ``super()`` bypass ``__getattribute__``, so they are not wrapped and a step is
recorded only once.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord
from flwr.common.logger import log
from flwr.server import Server
from flwr.server import strategy as legacy
from flwr.server.workflow import DefaultWorkflow
from flwr.server.workflow.constant import MAIN_PARAMS_RECORD
from flwr.serverapp.strategy import Strategy

from flower_gpu.flower.records import records_of
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.strategies import rounds
from flower_gpu.strategies.evaluate import GPUEvaluate
from flower_gpu.strategies.fedbuff import FedBuff
from flower_gpu.strategies.recording.recorder import OnEvent, Recorder, clean
from flower_gpu.strategies.strategy import FedAvg
from flower_gpu.strategies.strategy_state import RESUMABLE, StrategyState, kind_of, state_of
from flower_gpu.strategies.streaming import ComingReplies, configured, streamed_strategies
from flower_gpu.trace import EVALUATE, SERVER_EVALUATE, TRAIN

#: Called in place of a method, with the object, the method, and the arguments of the call.
_Hook = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def recorded_rounds(
    on_event: OnEvent,
    partition_of: Callable[[int], int] | None = None,
    pointer: Callable[[], str] | None = None,
    *,
    streams: bool = False,
) -> Iterator[Recorder]:
    """Record the rounds of Flower's strategies in this process within the context.

    ``on_event``: called with each event of the rounds, one at a time, in the thread where it happens. An
    exception that it raises ends the run.
    ``partition_of``, ``pointer``: as for the :class:`Recorder`.
    ``streams``: let Flower's strategies sum replies as they arrive.
    Messages and replies are recorded by a :class:`.RecordedGrid`.
    """
    recorder = Recorder(on_event, partition_of, pointer)
    hooks = _Hooks(recorder, streams)
    with ExitStack() as stack:
        if streams:
            stack.enter_context(streamed_strategies())
        stack.enter_context(_hooked_methods(Strategy, hooks.of_strategies))
        stack.enter_context(_hooked_methods(legacy.Strategy, hooks.of_legacy_strategies))
        stack.enter_context(_hooked_methods(Server, {"fit": hooks.fit}))
        stack.enter_context(_hooked_call(DefaultWorkflow, hooks.workflow))
        stack.enter_context(_hooked_call(GPUEvaluate, hooks.evaluate))
        stack.enter_context(_replaced(GPUEvaluate, "is_shown", False))  # the run's display shows its rounds
        try:
            yield recorder
        except BaseException:
            recorder.close(is_whole=False)
            raise
        recorder.close()


@contextmanager
def _hooked_methods(cls: type, hooks: Mapping[str, _Hook]) -> Iterator[None]:
    """Let hooks be called in place of methods of a class and of all derived classes."""
    get: Any = cls.__getattribute__

    def get_hooked(self: Any, name: str) -> Any:
        value = get(self, name)
        hook = hooks.get(name)
        return value if hook is None else _hooked(hook, self, value)

    with _replaced(cls, "__getattribute__", get_hooked):
        yield


@contextmanager
def _hooked_call(cls: type, hook: _Hook) -> Iterator[None]:
    """Let a hook be called in place of ``__call__``, which Python looks up without ``__getattribute__``."""
    method: Any = cls.__call__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(self, functools.partial(method, self), args, kwargs)

    with _replaced(cls, "__call__", call):
        yield


def _hooked(hook: _Hook, owner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(owner, method, args, kwargs)

    functools.update_wrapper(call, method, updated=())
    # By these attributes, strategies find out if a derived class overrides a method.
    for name in ("__func__", "__self__"):
        if hasattr(method, name):
            setattr(call, name, getattr(method, name))
    return call


@contextmanager
def _replaced(cls: type, name: str, value: Any) -> Iterator[None]:
    was_set, previous = name in vars(cls), vars(cls).get(name)
    setattr(cls, name, value)
    try:
        yield
    finally:
        if was_set:
            setattr(cls, name, previous)
        else:
            delattr(cls, name)


class _Hooks:
    """The hooks. If a call contains another, as in a strategy around a strategy, only the outer counts."""

    def __init__(self, recorder: Recorder, streams: bool) -> None:
        self._recorder = recorder
        self._streams = streams
        self._inside = threading.local()
        self._starts = 0
        self.of_strategies: Mapping[str, _Hook] = {
            "start": self._start,
            "configure_train": functools.partial(self._configure, TRAIN),
            "configure_evaluate": functools.partial(self._configure, EVALUATE),
            "aggregate_train": functools.partial(self._aggregate, TRAIN, self._trained),
            "aggregate_evaluate": functools.partial(self._aggregate, EVALUATE, dict),
        }
        self.of_legacy_strategies: Mapping[str, _Hook] = {
            "configure_fit": functools.partial(self._configure, TRAIN),
            "configure_evaluate": functools.partial(self._configure, EVALUATE),
            "aggregate_fit": functools.partial(self._aggregate, TRAIN, self._trained),
            "aggregate_evaluate": functools.partial(self._aggregate, EVALUATE, _with_loss),
            "evaluate": self.evaluate,
        }

    def fit(self, server: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        num_rounds = _named(method, args, kwargs).get("num_rounds")
        with self._legacy_run(server.strategy, num_rounds) as is_first:
            # Flower's server uses a thread for each message in flight.
            if is_first and server.max_workers is None:
                server.set_max_workers(self._recorder.concurrency)
            result = method(*args, **kwargs)
            if server.parameters.tensors:
                self._recorder.model = server.parameters
        return result

    def workflow(self, _: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        context: Any = _named(method, args, kwargs).get("context")
        if not hasattr(context, "strategy"):  # the workflow is going to say what is wrong
            return method(*args, **kwargs)
        with self._legacy_run(context.strategy, context.config.num_rounds):
            result = method(*args, **kwargs)
            model = records_of(context.state, ArrayRecord).get(MAIN_PARAMS_RECORD)
            self._recorder.model = self._recorder.model if model is None else model
        return result

    @contextmanager
    def _legacy_run(self, strategy: Any, num_rounds: int | None) -> Iterator[bool]:
        """Record a run of a strategy of Flower's older API. Yields True unless another run contains it."""
        with self._outermost("start") as is_first:
            if is_first:
                _say_no_checkpoint(strategy)
                self._recorder.run_started(type(strategy).__name__, num_rounds)
            yield is_first
            if is_first:
                self._recorder.run_ended()

    def _start(self, strategy: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._outermost("start") as is_first:
            if not is_first:
                return method(*args, **kwargs)
            named = _named(method, args, kwargs)
            state = self._state_of(strategy, named)
            kind = getattr(strategy, "checkpoint_kind", getattr(state or method, "kind", None))
            if kind is None and self._starts == 1 and kind_of(strategy) is None:
                _say_no_checkpoint(strategy)
            self._recorder.run_started(type(strategy).__name__, named.get("num_rounds"), kind)
            self._recorder.model = named.get("initial_arrays")
            evaluate = named.get("evaluate_fn")
            # Our strategies run the function in a worker, so a wrapper would have to be pickled. They use
            # GPUEvaluate, which is wrapped already.
            if callable(evaluate) and not isinstance(strategy, FedAvg):
                hooked = _hooked(self.evaluate, strategy, evaluate)
                if any(value is evaluate for value in args):
                    args = tuple(hooked if value is evaluate else value for value in args)
                else:
                    kwargs = {**kwargs, "evaluate_fn": hooked}
            result = (
                method(*args, **kwargs)
                if state is None
                else rounds.run(strategy, **_named(method, args, kwargs), strategy_state=state)
            )
            self._ended(result)
            return result

    def _state_of(self, strategy: Any, named: Mapping[str, Any]) -> StrategyState | None:
        """Return the state of an app's first strategy if it can resume an earlier run, otherwise None."""
        self._starts += 1
        is_resumable = isinstance(named.get("grid"), rounds.ResumableGrid)
        if self._starts > 1 or not is_resumable or isinstance(strategy, FedAvg):  # ours resumes by itself
            return None
        # A later version of Flower may have more parameters.
        has_known_parameters = named.keys() <= inspect.signature(rounds.run).parameters.keys()
        return state_of(strategy) if has_known_parameters else None

    def _ended(self, result: Any) -> None:
        if getattr(result, "arrays", None):
            self._recorder.model = result.arrays
        # A strategy with its own start() may get metrics without the methods that are hooked here.
        for kind, name in (
            (TRAIN, "train_metrics_clientapp"),
            (EVALUATE, "evaluate_metrics_clientapp"),
            (SERVER_EVALUATE, "evaluate_metrics_serverapp"),
        ):
            for server_round, metrics in dict(getattr(result, name, None) or {}).items():
                self._recorder.evaluated(server_round, clean(metrics), kind=kind)
        self._recorder.run_ended()

    def _configure(self, kind: str, strategy: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._outermost(f"configure {kind}") as is_first:
            if not is_first:
                return method(*args, **kwargs)
            self._recorder.phase_opened(kind, _round(args, kwargs))
            messages = method(*args, **kwargs)
            if isinstance(strategy, legacy.Strategy):
                messages = self._longest_first(kind, messages)
            total = len(messages) if hasattr(messages, "__len__") else None
            updates = strategy.buffer_size if isinstance(strategy, FedBuff) and kind == TRAIN else None
            self._recorder.phase_announced(kind, total, updates)
            is_streamed = self._streams and kind == TRAIN
            return configured(strategy, messages) if is_streamed else messages

    def _longest_first(self, kind: str, asked: Any) -> Any:
        """Sort the clients of a legacy strategy: Flower's ``Server`` sends in this order, a few at a time."""
        expected_s = self._recorder.expected_s
        if expected_s is None or not isinstance(asked, list):
            return asked
        seconds = iter(expected_s(kind, [getattr(client, "node_id", None) for client, _ in asked]))
        return sorted(asked, key=lambda _: -next(seconds))

    def _aggregate(
        self,
        kind: str,
        metrics_in: Callable[[Any], Mapping[str, Any]],
        _: Any,
        method: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        with self._outermost(f"aggregate {kind}") as is_first:
            # Flower's legacy server counts an exception in its threads as the failure of a client, so the
            # error that ends the run is raised here.
            self._recorder.check()
            if is_first and self._streams:
                self._sort_results([*args, *kwargs.values()])
            result = method(*args, **kwargs)
            if is_first:
                for replies in (*args, *kwargs.values()):
                    if isinstance(replies, ComingReplies):
                        replies.all()  # if the strategy has not accessed them
                metrics = {} if result is None else clean(metrics_in(result))
                self._recorder.phase_closed(kind, _round(args, kwargs), metrics)
            return result

    def _sort_results(self, arguments: list[Any]) -> None:
        """Sort results by node, because Flower's legacy server collects them from a set."""
        for results in arguments:
            if isinstance(results, list) and all(
                isinstance(pair, tuple) and len(pair) == 2 for pair in results
            ):
                nodes = [getattr(client, "node_id", None) for client, _ in results]
                if None not in nodes:
                    results.sort(key=lambda result: self._recorder.place_of(result[0].node_id))

    def _trained(self, result: Any) -> Mapping[str, Any]:
        model, metrics = result
        if model is not None:
            self._recorder.model = model
        return metrics or {}

    def evaluate(self, _: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._outermost("evaluate on the server") as is_first:
            began_s = time.monotonic()
            result = method(*args, **kwargs)
            if is_first and result is not None:
                seconds = round(time.monotonic() - began_s, 3)
                metrics = _with_loss(result) if isinstance(result, tuple) else result
                self._recorder.evaluated(_round(args, kwargs), clean(metrics), seconds)
            return result

    @contextmanager
    def _outermost(self, name: str) -> Iterator[bool]:
        """Yield True unless this thread is inside another call of the same name."""
        inside: set[str] = self._inside.__dict__.setdefault("names", set())
        if name in inside:
            yield False
            return
        inside.add(name)
        try:
            yield True
        finally:
            inside.discard(name)


def _say_no_checkpoint(strategy: Any) -> None:
    """Log at the start of a run with a results folder that the run cannot be resumed."""
    if RUN_DIR_VARIABLE in os.environ:
        log(
            WARNING,
            "There will be no checkpoint, so this run cannot be resumed: the state of %s is not known. %s",
            f"{type(strategy).__module__}.{type(strategy).__qualname__}",
            RESUMABLE,
        )


def _named(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arguments of a call by name, or an empty mapping if the call is going to fail."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    return {**bound.arguments, **bound.kwargs}


def _round(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    value = kwargs.get("server_round", args[0] if args else None)
    return value if isinstance(value, int) else None


def _with_loss(result: Any) -> Mapping[str, Any]:
    loss, metrics = result
    return {**({} if loss is None else {"loss": loss}), **(metrics or {})}
