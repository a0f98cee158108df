"""The one place where a call is put together: settings, worker, progress, trace."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from flower_gpu import trace
from flower_gpu.config import WorkerSettings
from flower_gpu.errors import WorkerDiedError, WorkerTimeoutError
from flower_gpu.isolation import start, threads, worker
from flower_gpu.isolation.call import Call, Task, task_name
from flower_gpu.isolation.preload import checked
from flower_gpu.progress_display import ProgressDisplay

#: Name of calls that no client makes: server-side evaluation, initial weights.
SERVER = "server"


def run_call(
    task: Task,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    settings: WorkerSettings,
    kind: str,
) -> Any:
    """Run one call of one client in its own worker.

    Parameters
    ----------
    task : callable or str
        The function to run, or ``"package.module:function"``.
    args, kwargs
        Its arguments.
    settings : WorkerSettings
        Start method, time limit, environment, and the client's name.
    kind : str
        What the call is, for the trace and for messages: ``"fit"``, ``"evaluate"``, ...

    Returns
    -------
    object
        What the task returned, after the worker is gone.
    """
    client = settings.name or SERVER
    label = f"{kind} on the server" if client == SERVER else f"{kind} of client {client}"
    method = start.choose(settings.start_method, preload=bool(settings.preload))
    count = threads.of_worker(settings.threads, settings.env, method)
    env = threads.environment(count, settings.env)
    setup = None if method == "spawn" else threads.SETUP  # nothing is loaded there yet
    around: AbstractContextManager[None] = nullcontext()
    if method == "fork":
        around = threads.prepared({**os.environ, **env})
    elif method == "in-process":
        around = threads.restored()
    record: dict[str, Any] = {"client": client, "task": kind, "start_method": method, "threads": count}

    def on_start(pid: int, used: str) -> None:
        record.update(pid=pid, start_method=used)
        trace.write("worker_started", **record)

    began = time.monotonic()
    error: BaseException | None = None
    try:
        with ProgressDisplay(label, record) as display, around:
            return worker.run(
                Call(task, args, kwargs or {}, env=env, setup=setup, label=label, preload=settings.preload),
                method,
                timeout_s=settings.timeout_s,
                on_event=display.on_event,
                on_start=on_start,
                or_spawn=settings.start_method == "auto",
            )
    except BaseException as caught:
        error = caught
        raise
    finally:
        if "pid" in record:
            trace.write(
                "worker_finished",
                **record,
                seconds=round(time.monotonic() - began, 4),
                outcome=_outcome(error),
                error=None if error is None else _text(error),
            )


def run_in_worker(
    task: Task,
    *args: Any,
    start_method: str | None = None,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    preload: Any = None,
    **kwargs: Any,
) -> Any:
    """Run any function in a worker process, for example to build the initial weights on the server.

    Parameters
    ----------
    task : callable or str
        The function, or ``"package.module:function"``: then only the worker imports that module.
    *args, **kwargs
        Arguments of the function: numpy arrays, plain values, or anything cloudpickle takes.
    start_method : str, optional
        One of :data:`flower_gpu.config.START_METHODS`; default ``"auto"``.
    timeout_s : float, optional
        Seconds the call may take.
    env : mapping of str to str, optional
        Environment variables of the worker.
    name : str, optional
        The client's name in the trace and in messages.
    preload : str, tuple or list, optional
        What to load once for all workers, as for :class:`flower_gpu.GPUClient`.

    Returns
    -------
    object
        What the function returned.

    Raises
    ------
    WorkerError
        If the worker could not be started, died, or took too long.
    Exception
        What the function raised, with the worker's traceback as its cause.

    Examples
    --------
    >>> weights = run_in_worker("task:initial_weights", seed=42)
    """
    settings = WorkerSettings.resolve(start_method, timeout_s, env, name, checked(preload))
    return run_call(task, args, kwargs, settings=settings, kind=task_name(task))


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ failed
        return type(error).__name__


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    if isinstance(error, WorkerTimeoutError):
        return "timeout"
    if isinstance(error, WorkerDiedError):
        return "died"
    return "error" if isinstance(error, Exception) else "cancelled"
