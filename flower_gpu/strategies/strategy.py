"""FedAvg with server-side evaluation only, for both of Flower's strategy interfaces.

No client is ever asked to evaluate. The global model is evaluated on the server, in a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from logging import WARNING
from typing import Any

from flwr.common import (
    Array,
    ArrayRecord,
    ConfigRecord,
    FitRes,
    Message,
    MetricRecord,
    Parameters,
    Scalar,
    ndarrays_to_parameters,
)
from flwr.common.constant import SType
from flwr.common.logger import log
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg as _NumPyClientFedAvg
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as _MessageFedAvg
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from flower_gpu.errors import ConfigError, InvalidResultError
from flower_gpu.strategies import rounds, streaming
from flower_gpu.strategies.averaging import ReplySum
from flower_gpu.strategies.evaluate import GPUEvaluate, isolated
from flower_gpu.strategies.running_mean import RunningMean
from flower_gpu.strategies.strategy_state import OUR_FEDAVG, kind_of, state_of
from flower_gpu.workers.call import Task

_NOT_EVALUATED = (
    "No evaluate_fn is given: clients do not evaluate under this strategy, so nothing is evaluated."
)


def _check_fraction_evaluate(fraction_evaluate: float, flowers: str) -> None:
    """Raise ConfigError unless the fraction is 0, because the strategy evaluates on the server only.

    ``flowers``: name of Flower's strategy with evaluation by clients.
    """
    if fraction_evaluate:
        raise ConfigError(
            f"fraction_evaluate={fraction_evaluate}: clients do not evaluate under this strategy, the server "
            f"does, with evaluate_fn. Leave fraction_evaluate out, or use {flowers} to let clients evaluate"
        )


class FedAvg(_MessageFedAvg):
    """Federated averaging with server-side evaluation only, for the Message API.

    Like ``flwr.serverapp.strategy.FedAvg`` (McMahan et al., 2017, https://arxiv.org/abs/1602.05629), without
    client evaluation. Results are weighted by their number of examples. Integer arrays, such as the counters
    of BatchNorm, stay integers. Sums are formed in 64-bit floats.

    Some grids, such as the grid of ``flower-gpu simulate``, return replies one by one. Each reply is then
    added to a running sum and freed, so memory does not grow with the number of clients. A derived class with
    its own ``aggregate_train`` gets all replies in a list.

    Parameters
    ----------
    fraction_train : float
        Fraction of nodes that train in a round.
    min_train_nodes, min_available_nodes : int
        Minimum number of nodes that train, and that must be connected.
    weighted_by_key, arrayrecord_key, configrecord_key : str
        Names in the records, as in Flower.
    train_metrics_aggr_fn : callable, optional
        As in Flower; by default the mean over examples. It gets the replies without their arrays if these
        were added to a running sum.
    exact_order : bool
        Sum in the order of the nodes, instead of the order in which replies arrive. In a simulation and under
        ``flower-gpu launch``, this is the order of the partitions, otherwise of the node ids. ``flower-gpu
        simulate --deterministic`` always does so.
    fraction_evaluate : float
        Accepted for apps that pass 0.0 to Flower's FedAvg. Other values raise ConfigError.
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        min_train_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Callable[[list[Any], str], MetricRecord] | None = None,
        exact_order: bool = False,
        fraction_evaluate: float = 0.0,
    ) -> None:
        _check_fraction_evaluate(fraction_evaluate, "flwr.serverapp.strategy.FedAvg")
        super().__init__(
            fraction_train=fraction_train,
            min_train_nodes=min_train_nodes,
            min_available_nodes=min_available_nodes,
            weighted_by_key=weighted_by_key,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
            train_metrics_aggr_fn=train_metrics_aggr_fn,
        )
        # Set after the constructor of Flower, which warns about a fraction of 0.
        self.fraction_evaluate = 0.0
        self.min_evaluate_nodes = 0
        self.exact_order = exact_order

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | str | None = None,
    ) -> Result:
        """Run all rounds; see ``flwr.serverapp.strategy.Strategy.start``.

        Parameters
        ----------
        grid : Grid
            Connection to the nodes.
        initial_arrays : ArrayRecord
            The initial global model.
        num_rounds : int
            Number of rounds.
        timeout : float
            Seconds to wait for the replies of a round.
        train_config, evaluate_config : ConfigRecord, optional
            Sent to the nodes with the model; nothing is sent for evaluation.
        evaluate_fn : callable, str or GPUEvaluate, optional
            Server-side evaluation ``(server_round, arrays) -> MetricRecord``. It runs in a worker, wrapped by
            :func:`flower_gpu.gpu_evaluate` unless it is already.

        Returns
        -------
        Result
            Final arrays, training metrics, and server-side metrics per round.
        """
        evaluate = isolated(evaluate_fn, num_rounds)
        if evaluate is None:
            log(WARNING, _NOT_EVALUATED)
        return self._run(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate)

    @property
    def checkpoint_kind(self) -> str:
        """Name of the strategies that can go on from a checkpoint of this one."""
        return kind_of(self) or OUR_FEDAVG

    def _run(self, grid: Grid, *rest: Any) -> Result:
        if not isinstance(grid, rounds.ResumableGrid):
            return super().start(grid, *rest)
        run: Callable[..., Result] = rounds.run
        state = state_of(self)  # None, unless a derived class opts in with state_dict()
        return run(self, grid, *rest, strategy_state=state, sums_replies=streaming.sums_only(self))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: clients do not evaluate."""
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the replies by number of examples; integer arrays stay integer.

        Parameters
        ----------
        server_round : int
            The round.
        replies : iterable of Message
            If it is no sequence, each one is freed before the next is asked for, except with
            ``exact_order``. The grid of a simulation brings sums.

        Returns
        -------
        tuple of ArrayRecord and MetricRecord
            The new global model and the metrics; None and None without any valid reply.

        Raises
        ------
        InconsistentMessageReplies
            If the replies do not go together, as in Flower.
        InvalidResultError
            If arrays of the same name do not go together.
        """
        total = ReplySum(self.weighted_by_key)
        return streaming.aggregate(self, replies, total, in_order=self.exact_order)


class LegacyFedAvg(_NumPyClientFedAvg):
    """Federated averaging with server-side evaluation only, for the NumPyClient API.

    As ``flwr.server.strategy.FedAvg``, for ``ServerApp(server_fn)`` and ``start_server``, without client
    evaluation. Training metrics are averaged over examples unless ``fit_metrics_aggregation_fn`` is given,
    and failures are logged with their reason.

    Sums are formed in 64-bit floats, one model at a time. An array stays an integer if all clients send
    integers, and its mean is rounded. Otherwise it has a dtype that holds the values of all clients. Flower's
    own average turns integers into zeros, and cuts floats where the first client sends integers.

    Parameters
    ----------
    evaluate_fn : callable, str or GPUEvaluate, optional
        Server-side evaluation ``(server_round, ndarrays, config) -> (loss, metrics)``. It runs in a worker,
        wrapped by :func:`flower_gpu.gpu_evaluate` unless it is already.
    initial_parameters : Parameters or list of ndarray, optional
        The initial global model; by default one client is asked.
    num_rounds : int, optional
        Shown in the progress of rounds.
    fraction_fit, min_fit_clients, min_available_clients, on_fit_config_fn, accept_failures, \
fit_metrics_aggregation_fn
        As in Flower.
    fraction_evaluate : float
        Accepted for apps that pass 0.0 to Flower's FedAvg. Anything else raises ConfigError.
    """

    def __init__(
        self,
        *,
        evaluate_fn: Task | GPUEvaluate | None = None,
        initial_parameters: Parameters | list[NDArray[Any]] | None = None,
        num_rounds: int | None = None,
        fraction_fit: float = 1.0,
        min_fit_clients: int = 2,
        min_available_clients: int = 2,
        on_fit_config_fn: Callable[[int], dict[str, Scalar]] | None = None,
        accept_failures: bool = True,
        fit_metrics_aggregation_fn: Callable[[list[tuple[int, dict[str, Scalar]]]], dict[str, Scalar]]
        | None = None,
        fraction_evaluate: float = 0.0,
    ) -> None:
        _check_fraction_evaluate(fraction_evaluate, "flwr.server.strategy.FedAvg")
        if isinstance(initial_parameters, list):
            initial_parameters = ndarrays_to_parameters(initial_parameters)
        evaluate = isolated(evaluate_fn, num_rounds)
        if evaluate is None:
            log(WARNING, _NOT_EVALUATED)
        super().__init__(
            fraction_fit=fraction_fit,
            fraction_evaluate=0.0,
            min_fit_clients=min_fit_clients,
            min_evaluate_clients=0,
            min_available_clients=min_available_clients,
            evaluate_fn=evaluate,
            on_fit_config_fn=on_fit_config_fn,
            accept_failures=accept_failures,
            initial_parameters=initial_parameters,
            fit_metrics_aggregation_fn=fit_metrics_aggregation_fn or mean_over_examples,
        )

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[Any]:
        """Return no clients: clients do not evaluate."""
        return []

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Average the results by number of examples; log why clients failed."""
        for failure in failures:
            if isinstance(failure, BaseException):
                log(WARNING, "A client failed in round %s: %s", server_round, failure)
            else:
                client, result = failure
                log(
                    WARNING,
                    "Client %s failed in round %s: %s",
                    client.cid,
                    server_round,
                    result.status.message,
                )
        if not results or (failures and not self.accept_failures):
            return None, {}
        aggregate_metrics = self.fit_metrics_aggregation_fn or mean_over_examples
        metrics = aggregate_metrics([(result.num_examples, result.metrics) for _, result in results])
        return _mean_of_parameters(results), metrics


def mean_over_examples(metrics: list[tuple[int, dict[str, Scalar]]]) -> dict[str, Scalar]:
    """Average each numeric metric over the examples of the clients that report it.

    Parameters
    ----------
    metrics : list of (int, dict)
        Number of examples and metrics of each client.

    Returns
    -------
    dict
        The means; metrics that are no numbers are left out.
    """
    sums: dict[str, tuple[float, int]] = {}
    for num_examples, values in metrics:
        for key, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                total, count = sums.get(key, (0.0, 0))
                sums[key] = (total + value * num_examples, count + num_examples)
    return {key: total / count for key, (total, count) in sums.items() if count}


def _mean_of_parameters(results: list[tuple[ClientProxy, FitRes]]) -> Parameters:
    """Return the mean of models, weighted by examples; one model at a time is looked at.

    Flower's own mean is formed in place, in the dtype of the first model. Integers become 0 there, because
    each array is scaled by a factor that is cast to its dtype, and a float is cut where the first model has
    an integer.
    """
    mean = RunningMean()
    for client, result in results:
        source = f"client {client.cid}"
        tensors = result.parameters.tensors
        record = {str(number): Array("", (), SType.NUMPY, data) for number, data in enumerate(tensors)}
        if not mean.fits(record):
            raise InvalidResultError(
                f"{source} returned {len(record)} arrays, and clients before it {len(mean.keys())}: do all "
                "clients train the same model?"
            )
        mean.add(record, result.num_examples, source)
    return ndarrays_to_parameters([array.numpy() for array in mean.finish().values()])
