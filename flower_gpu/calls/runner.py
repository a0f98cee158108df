"""Running a call: this module puts together its settings, the GPUs it may use, its lease and its tries."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from flower_gpu import standard_streams
from flower_gpu.calls import environment, grants, leasing
from flower_gpu.calls.leasing import Leasing
from flower_gpu.calls.settings import CallSettings, call_settings, split
from flower_gpu.calls.tries import SERVER, Tries, Workers
from flower_gpu.leases.footprint_rule import ShapedArray, key_of
from flower_gpu.options import OnOomWord, PolicyWord, StartMethodWord
from flower_gpu.workers.call import Task, task_key, task_name


def run_call(
    task: Task,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    settings: CallSettings,
    kind: str,
    name: str | None = None,
    arrays: Sequence[ShapedArray] = (),
    config: Mapping[str, Any] | None = None,
    server_round: int | None = None,
    workers: Workers | None = None,
    by_name: bool = False,
    clients: Sequence[str] = (),
) -> Any:
    """Run one call of a client in its own worker, and return its result.

    The call uses a GPU if node and server want that.

    ``clients``: names of the clients of a call for several clients. Each has its own lines in the trace.
    ``by_name``: True if the user's function is given by its name only. Its worker then needs nothing of this
    process.

    Raises
    ------
    GPUError
        If the node requires a GPU that cannot be used, or the lease was not granted in time.
    GPUOutOfMemoryError
        If all tries ran out of GPU memory.
    WorkerError
        If the worker could not be started, died, or took too long.
    """
    standard_streams.fill()
    client = settings.worker.name or SERVER
    label = f"{kind} on the server" if client == SERVER else f"{kind} of client {client}"
    if server_round is None:
        server_round = _round_in(config or {})
    workers = workers or Workers()
    fields = {"call": os.urandom(6).hex(), "client": client, "task": kind, "round": server_round}
    # The environment is not copied, because reading all of it would take a good part of a short call.
    environ = ChainMap(dict(settings.worker.env), environment.without_ray(os.environ))
    call = Tries(task, args, kwargs or {}, settings, environ, label, fields, workers, by_name, clients)
    if leasing.is_worker():
        # A worker that starts another worker shares its lease with it, if it has one.
        return call.once(leasing.of_this_process())
    # Impossible settings are refused before the call waits for a lease.
    call.workers.choose(settings.worker.start_method)
    grants.refuse(settings)
    decision = leasing.decide(settings.gpu, settings.gpu.requested(config or {}), environ)
    sizes = {**settings.gpu.run_config, **(config or {})}
    key = key_of(f"{name or task_key(task)} {kind}", arrays, sizes)
    uuids = decision.uuids if decision.on_gpu else ()
    leases = Leasing(settings.gpu, uuids, label, key, call.fields, settings.host)
    return call.run(leases)


def run_in_worker(
    task: Task,
    *args: Any,
    start_method: StartMethodWord | None = None,
    gpu: PolicyWord | None = None,
    on_oom: OnOomWord | None = None,
    **kwargs: Any,
) -> Any:
    """Run any function in a worker process and return its result.

    An example is building the initial weights on the server.

    Parameters
    ----------
    task : callable or str
        The function, or its name as ``"package.module:function"``. With a name, only the worker imports the
        module.
    *args
        Arguments of the function: NumPy arrays, plain values, or anything that cloudpickle can pickle.
    start_method, gpu, on_oom, **kwargs
        Keyword arguments of the function, and options of :class:`flower_gpu.CallOptions`. The options are not
        passed to the function.

    Returns
    -------
    object
        The return value of the function.

    Raises
    ------
    WorkerError
        If the worker could not be started, died, or took too long.
    GPUError
        If the function needs a GPU and cannot get any.
    Exception
        Any error that the function raised, with the worker's traceback as its cause.

    Examples
    --------
    >>> weights = run_in_worker("task:initial_weights", seed=42)
    """
    options, rest = split(kwargs, start_method=start_method, gpu=gpu, on_oom=on_oom)
    arrays = [
        value for value in (*args, *rest.values()) if hasattr(value, "shape") and hasattr(value, "dtype")
    ]
    settings = call_settings(options)
    return run_call(
        task,
        args,
        rest,
        settings=settings,
        kind=task_name(task),
        arrays=arrays,
        by_name=isinstance(task, str),
    )


def _round_in(config: Mapping[str, Any]) -> int | None:
    """Return the round from a server's config, by Flower's own key or the key of its examples, or None."""
    for key in ("server-round", "server_round"):
        if type(config.get(key)) is int:
            return int(config[key])
    return None
