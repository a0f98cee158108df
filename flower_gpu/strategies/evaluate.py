"""Server-side evaluation in a worker, for both of Flower's strategy interfaces."""

from __future__ import annotations

import time
from collections.abc import Mapping
from logging import INFO
from typing import Any, ClassVar, Unpack

from flwr.common import ArrayRecord, MetricRecord
from flwr.common.logger import log

from flower_gpu import trace
from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import CallSettings, call_settings
from flower_gpu.calls.tries import SERVER
from flower_gpu.errors import InvalidResultError
from flower_gpu.flower import results
from flower_gpu.options import CallOptions
from flower_gpu.strategies.recording.recorder import finite
from flower_gpu.workers.call import Task, check_task, task_key, task_name

_SHOWN = ("loss", "accuracy", "f1")


class GPUEvaluate:
    """An ``evaluate_fn`` for a Flower strategy, returned by :func:`gpu_evaluate`.

    Attributes
    ----------
    is_shown : bool
        True if this object logs a line for each round. A simulation shows the rounds itself.
    """

    is_shown: ClassVar[bool] = True

    def __init__(
        self, fn: Task, kwargs: Mapping[str, Any], num_rounds: int | None, settings: CallSettings
    ) -> None:
        check_task(fn)
        self.num_rounds = num_rounds
        self._fn = fn
        self._kwargs = dict(kwargs)
        self._settings = settings
        self._shown_at_s = time.monotonic()

    def __call__(self, server_round: int, arrays: Any, config: Any = None) -> Any:
        """Evaluate the global model of one round in a worker.

        Parameters
        ----------
        server_round : int
            The round; 0 is the initial model.
        arrays : ArrayRecord or list of ndarray
            The global model, as the strategy passes it.
        config : dict, optional
            Only strategies of the NumPyClient API pass it.

        Returns
        -------
        MetricRecord, tuple of (float, dict), or None
            The result in the form that this kind of strategy expects. None if ``fn`` returned None.
        """
        is_message_api = isinstance(arrays, ArrayRecord)
        args = (server_round, arrays) if is_message_api else (server_round, arrays, config or {})
        metrics = run_call(
            results.server_evaluate,
            (self._fn, args, self._kwargs),
            settings=self._settings,
            kind="evaluate",
            name=task_key(self._fn),
            arrays=list(arrays.values()) if is_message_api else arrays,
            config=config or {},
            server_round=server_round,
        )
        if metrics is None:
            return None
        finite_metrics = finite(metrics, trace.spelled)
        trace.write("round", round=server_round, num_rounds=self.num_rounds, metrics=finite_metrics)
        if self.is_shown:
            self._show(server_round, metrics)
        if is_message_api:
            return _metric_record(metrics, task_name(self._fn))
        loss = metrics.pop("loss")
        return loss, metrics

    def _show(self, server_round: int, metrics: Mapping[str, Any]) -> None:
        """Log a line for the round, instead of a progress bar, which Flower's log lines would break up."""
        now = time.monotonic()
        seconds, self._shown_at_s = now - self._shown_at_s, now
        of = "" if self.num_rounds is None else f"/{self.num_rounds}"
        text = "  ".join(f"{key} {metrics[key]:.4f}" for key in _SHOWN if _is_number(metrics.get(key)))
        log(INFO, "round %s%s  %s  %.1f s", server_round, of, text, seconds)


def gpu_evaluate(
    fn: Task,
    *,
    kwargs: Mapping[str, Any] | None = None,
    num_rounds: int | None = None,
    **options: Unpack[CallOptions],
) -> GPUEvaluate:
    """Return an ``evaluate_fn`` that runs a strategy's centralized evaluation in a worker.

    Parameters
    ----------
    fn : callable or str
        The evaluation function as Flower expects it: ``fn(server_round, arrays)`` for
        ``strategy.start(evaluate_fn=...)``, or ``fn(server_round, ndarrays, config)`` for strategies of the
        NumPyClient API. It may return the type that Flower expects (a ``MetricRecord``, or loss and metrics).
        For both kinds of strategies it may also return a dict with ``"loss"`` and other numbers. If it is
        given as ``"package.module:function"``, only the worker imports it.
    kwargs : mapping, optional
        Further keyword arguments of ``fn``.
    num_rounds : int, optional
        Number of rounds, shown in the progress of rounds.
    **options
        Options of the call, such as its share of a GPU: see :class:`flower_gpu.CallOptions`.

    Returns
    -------
    GPUEvaluate
        The ``evaluate_fn`` to pass to a strategy.

    Examples
    --------
    >>> strategy = FedAdam()
    >>> strategy.start(grid, arrays, evaluate_fn=gpu_evaluate(global_evaluate))
    """
    settings = call_settings({"name": SERVER, **options})
    return GPUEvaluate(fn, kwargs or {}, num_rounds, settings)


def isolated(fn: Task | GPUEvaluate | None, num_rounds: int | None) -> GPUEvaluate | None:
    """Return ``fn``, wrapped unless it is already, with the number of rounds set unless it already is."""
    if fn is None:
        return None
    evaluate = fn if isinstance(fn, GPUEvaluate) else gpu_evaluate(fn)
    if evaluate.num_rounds is None:
        evaluate.num_rounds = num_rounds
    return evaluate


def _metric_record(metrics: Mapping[str, Any], name: str) -> MetricRecord:
    wrong = [key for key, value in metrics.items() if not isinstance(value, int | float | list)]
    if wrong:
        raise InvalidResultError(
            f"{name}: metric {wrong[0]!r} is a {type(metrics[wrong[0]]).__name__}; a MetricRecord takes "
            "numbers only"
        )
    return MetricRecord(dict(metrics))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
