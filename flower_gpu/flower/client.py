"""Clients that hold numpy weights only and do their GPU work in workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from logging import ERROR
from typing import Any, TypeVar, Unpack

from flwr.client import Client, NumPyClient
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetParametersRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.logger import log
from numpy.typing import NDArray

from flower_gpu.calls import leasing
from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import call_settings, split
from flower_gpu.errors import ConfigError, FlowerGPUError, InvalidResultError, shortened
from flower_gpu.flower import results
from flower_gpu.options import CallOptions, OnOomWord, PolicyWord, StartMethodWord
from flower_gpu.workers.call import Task, check_task, load_task, task_key, task_name

Weights = list[NDArray[Any]]
Config = dict[str, Any]

Ins = TypeVar("Ins", FitIns, EvaluateIns, GetParametersIns, GetPropertiesIns)
Res = TypeVar("Res", FitRes, EvaluateRes, GetParametersRes, GetPropertiesRes)

_OK = Status(Code.OK, "Success")
_OF_A_PROCESS = ("start_method", "timeout_s", "env", "preload")  # what only another process can follow
# Flower imports it in processes that call start_client, and nowhere else.
_START_CLIENT_MODULE = "flwr.compat.client.app"


class GPUClient(NumPyClient):
    """A Flower client whose ``fit`` and ``evaluate`` each run in a worker process that then exits.

    This process keeps numpy weights only, so GPU memory is back after every call. Give the two functions,
    or subclass and override :meth:`fit_in_worker` and :meth:`evaluate_in_worker`.

    Parameters
    ----------
    train_fn : callable or str, optional
        ``train_fn(weights, config, **kwargs) -> (weights, num_examples, metrics)`` with ``weights`` a list
        of numpy arrays. As ``"package.module:function"`` only workers import that module, and this process
        need not import torch at all.
    evaluate_fn : callable or str, optional
        ``evaluate_fn(weights, config, **kwargs) -> (loss, num_examples, metrics)``.
    kwargs : mapping, optional
        Further keyword arguments of both functions, for example the partition.
    initial_weights : list of ndarray, callable or str, optional
        Weights to give to a server that asks this client for the first ones; a function is called without
        arguments in a worker.
    **options
        How the calls run, and how much of a GPU they get: see :class:`flower_gpu.CallOptions`.

    Examples
    --------
    >>> def client_fn(context):
    ...     kwargs = {"partition": context.node_config["partition-id"]}
    ...     client = GPUClient("task:train", kwargs=kwargs, gpu_memory="2GiB", context=context)
    ...     return client.to_client()
    >>> app = ClientApp(client_fn)
    """

    def __init__(
        self,
        train_fn: Task | None = None,
        evaluate_fn: Task | None = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        initial_weights: Sequence[NDArray[Any]] | Task | None = None,
        **options: Unpack[CallOptions],
    ) -> None:
        for task in (train_fn, evaluate_fn):
            if task is not None:
                check_task(task)
        self._train_fn = train_fn
        self._evaluate_fn = evaluate_fn
        self._kwargs = dict(kwargs or {})
        self._initial_weights = initial_weights
        self._settings = call_settings(dict(options)).for_client(f"pid-{os.getpid()}")
        self._wants_process = any(options.get(name) is not None for name in _OF_A_PROCESS)
        self._weights: Weights | None = None

    def fit_in_worker(self, weights: Weights, config: Config) -> tuple[Weights, int, Config]:
        """Train; runs in a worker. Override it, or give ``train_fn``.

        Parameters
        ----------
        weights : list of ndarray
            The global model.
        config : dict
            What the server sent.

        Returns
        -------
        tuple
            Weights of the same shapes, the number of examples, and metrics.
        """
        if self._train_fn is None:
            raise NotImplementedError("neither train_fn nor fit_in_worker is given")
        result: tuple[Weights, int, Config] = load_task(self._train_fn)(weights, config, **self._kwargs)
        return result

    def evaluate_in_worker(self, weights: Weights, config: Config) -> tuple[float, int, Config]:
        """Evaluate; runs in a worker. Override it, or give ``evaluate_fn``.

        Returns
        -------
        tuple
            The loss, the number of examples, and metrics.
        """
        if self._evaluate_fn is None:
            raise NotImplementedError("neither evaluate_fn nor evaluate_in_worker is given")
        result: tuple[float, int, Config] = load_task(self._evaluate_fn)(weights, config, **self._kwargs)
        return result

    def fit(self, parameters: Weights, config: Config) -> tuple[Weights, int, Config]:
        """Run the training in a worker; called by Flower.

        Raises
        ------
        InvalidResultError
            If the function returned something else than weights of the shapes that were sent (finite, unless
            they were not when they came), the number of examples, and metrics.
        WorkerError
            If the worker could not be started, died, or took too long.
        """
        task, kwargs = self._task(self._train_fn, "fit_in_worker")
        args = (task, parameters, config, kwargs)
        weights, num_examples, metrics = self._run(results.fit, args, "fit", parameters, config)
        self._weights = weights
        return weights, num_examples, metrics

    def evaluate(self, parameters: Weights, config: Config) -> tuple[float, int, Config]:
        """Run the evaluation in a worker; called by Flower. Raises as :meth:`fit` does."""
        task, kwargs = self._task(self._evaluate_fn, "evaluate_in_worker")
        args = (task, parameters, config, kwargs)
        result: tuple[float, int, Config] = self._run(results.evaluate, args, "evaluate", parameters, config)
        self._weights = parameters
        return result

    def get_parameters(self, config: Config) -> Weights:
        """Return the last weights, or the initial ones; called by Flower."""
        if self._weights is None:
            initial = self._initial_weights
            if initial is None:
                raise FlowerGPUError(
                    "the server asks this client for the first weights and it has none: give the "
                    "strategy initial_parameters, or this client initial_weights"
                )
            if isinstance(initial, str) or callable(initial):
                initial = self._run(initial, (), "initial weights")
            self._weights = results.check_weights(list(initial), None, "initial_weights")
        return self._weights

    def to_client(self) -> Client:
        """Convert to the ``Client`` that ``client_fn`` returns."""
        return _WorkerClient(self)

    def implements(self, call: str) -> bool:
        """Return True if this client implements a call. ``call`` is its name in Flower, such as ``"fit"``."""
        kind = type(self)
        if call == "fit":
            return self._train_fn is not None or kind.fit_in_worker != GPUClient.fit_in_worker
        if call == "evaluate":
            return self._evaluate_fn is not None or kind.evaluate_in_worker != GPUClient.evaluate_in_worker
        if call == "get_properties":
            return kind.get_properties != NumPyClient.get_properties
        return True

    def __getstate__(self) -> dict[str, Any]:
        # A bound method is sent to the worker with its client; the weights go as arguments already.
        return {**self.__dict__, "_weights": None, "_initial_weights": None}

    def _task(self, function: Task | None, method: str) -> tuple[Task, dict[str, Any]]:
        if getattr(type(self), method) is not getattr(GPUClient, method) or function is None:
            return getattr(self, method), {}
        return function, self._kwargs

    def _run(
        self,
        task: Task,
        args: tuple[Any, ...],
        kind: str,
        weights: Sequence[NDArray[Any]] = (),
        config: Config | None = None,
    ) -> Any:
        if leasing.is_worker() and not self._wants_process:
            return load_task(task)(*args)  # the whole message runs in a worker with a lease already
        user_task = args[0] if weights else task
        named = self._named(user_task)
        settings = self._settings
        if num_gpus := getattr(user_task, "num_gpus", None):  # set by `distributed`
            settings = settings.derived({"num_gpus": num_gpus}).for_client(f"pid-{os.getpid()}")
        return run_call(
            task,
            args,
            settings=settings,
            kind=kind,
            name=task_key(named),
            arrays=weights,
            config=config,
            by_name=isinstance(named, str),
        )

    def _named(self, task: Task) -> Task:
        """Return the user's function, or its name, for a task."""
        return task


def gpu_client(
    client_class: type[NumPyClient] | str,
    *args: Any,
    start_method: StartMethodWord | None = None,
    gpu: PolicyWord | None = None,
    on_oom: OnOomWord | None = None,
    **kwargs: Any,
) -> GPUClient:
    """Return a client that runs the calls of an existing ``NumPyClient`` class in workers.

    Every call builds ``client_class(*args, **kwargs)`` in a new worker and calls its method there. So values
    that the class stores on ``self`` are gone after the call.

    Parameters
    ----------
    client_class : type or str
        The class, or ``"package.module:Class"``: then only workers import it.
    *args
        Its arguments.
    start_method, gpu, on_oom, **kwargs
        Its keyword arguments, and options as for :class:`GPUClient`, which it does not get: what has the name
        of one (see :class:`flower_gpu.CallOptions`) can be given to the class by position only.

    Returns
    -------
    GPUClient
        The client; ``client_fn`` returns its ``to_client()``.

    Examples
    --------
    >>> def client_fn(context):
    ...     return gpu_client(FlowerClient, Net(), context.node_config["partition-id"]).to_client()
    """
    options, rest = split(kwargs, start_method=start_method, gpu=gpu, on_oom=on_oom)
    return _HostedClient(client_class, args, rest, options)


class _HostedClient(GPUClient):
    """Builds a user's client in each worker and calls its method."""

    def __init__(
        self,
        client_class: type[NumPyClient] | str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(**options)
        if isinstance(client_class, str):
            check_task(client_class)
        elif not (isinstance(client_class, type) and issubclass(client_class, NumPyClient)):
            raise ConfigError(f"gpu_client takes a NumPyClient class and its arguments, not {client_class!r}")
        self._class = client_class
        self._args = args
        self._kwargs = dict(kwargs)

    def implements(self, call: str) -> bool:
        if isinstance(self._class, str):  # only the worker can tell
            return call != "get_properties"
        return getattr(self._class, call) is not getattr(NumPyClient, call)

    def fit_in_worker(self, weights: Weights, config: Config) -> tuple[Weights, int, Config]:
        return self._build("fit").fit(weights, config)

    def evaluate_in_worker(self, weights: Weights, config: Config) -> tuple[float, int, Config]:
        return self._build("evaluate").evaluate(weights, config)

    def get_parameters_in_worker(self, config: Config) -> Weights:
        weights = self._build("get_parameters").get_parameters(config)
        return results.check_weights(weights, None, f"{task_name(self._class)}.get_parameters")

    def get_properties_in_worker(self, config: Config) -> Config:
        return results.scalars(self._build("get_properties").get_properties(config), task_name(self._class))

    def get_parameters(self, config: Config) -> Weights:
        weights: Weights = self._run(self.get_parameters_in_worker, (config,), "get_parameters")
        return weights

    def get_properties(self, config: Config) -> Config:
        properties: Config = self._run(self.get_properties_in_worker, (config,), "get_properties")
        return properties

    def _named(self, task: Task) -> Task:
        return self._class

    def _build(self, method: str) -> NumPyClient:
        client = load_task(self._class)(*self._args, **self._kwargs)
        if not isinstance(client, NumPyClient):
            raise InvalidResultError(
                f"{task_name(self._class)} is a {type(client).__name__}, not a NumPyClient"
            )
        if getattr(type(client), method) is getattr(NumPyClient, method):
            raise NotImplementedError(f"{task_name(self._class)} does not implement {method}")
        return client


class _WorkerClient(Client):
    """The ``Client`` of a :class:`GPUClient`.

    Unlike Flower's own adapter, it reports which calls are implemented, although the base class has all of
    them. It also keeps a ``start_client`` process alive when a call fails. Flower would end the process on
    any exception, and the client would be missing in all later rounds.
    """

    def __init__(self, client: GPUClient) -> None:
        self.numpy_client = client

    def fit(self, ins: FitIns) -> FitRes:
        return self._respond("fit", self._fit, super().fit, ins)

    def _fit(self, ins: FitIns) -> FitRes:
        weights = parameters_to_ndarrays(ins.parameters)
        weights, num_examples, metrics = self.numpy_client.fit(weights, ins.config)
        return FitRes(_OK, ndarrays_to_parameters(weights), num_examples, metrics)

    def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        return self._respond("evaluate", self._evaluate, super().evaluate, ins)

    def _evaluate(self, ins: EvaluateIns) -> EvaluateRes:
        weights = parameters_to_ndarrays(ins.parameters)
        return EvaluateRes(_OK, *self.numpy_client.evaluate(weights, ins.config))

    def get_parameters(self, ins: GetParametersIns) -> GetParametersRes:
        return self._respond("get_parameters", self._get_parameters, super().get_parameters, ins)

    def _get_parameters(self, ins: GetParametersIns) -> GetParametersRes:
        weights = self.numpy_client.get_parameters(ins.config)
        return GetParametersRes(_OK, ndarrays_to_parameters(weights))

    def get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:
        return self._respond("get_properties", self._get_properties, super().get_properties, ins)

    def _get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:
        return GetPropertiesRes(_OK, self.numpy_client.get_properties(ins.config))

    def _respond(self, call: str, run: Callable[[Ins], Res], refuse: Callable[[Ins], Res], ins: Ins) -> Res:
        """Run a call, or refuse it like Flower if the client does not implement it.

        A ``start_client`` process reports a failure to the server as a refusal. Flower has no code for
        "failed", and a server counts any code except OK as a failure.
        """
        if not self.numpy_client.implements(call):
            return refuse(ins)
        try:
            return run(ins)
        except Exception as error:
            if _START_CLIENT_MODULE not in sys.modules:
                raise  # Flower sends it as an error, and this process handles only this call
            log(ERROR, "This call failed, and the client continues: %s", error, exc_info=error)
            refusal = refuse(ins)
            refusal.status.message = shortened(f"{type(error).__name__}: {error}")
            return refusal
