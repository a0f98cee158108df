"""A server of the older kind: a strategy that server_fn makes."""

import json

import numpy as np
from flwr.common import Context, Metrics, ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp


def mean(found: list[tuple[int, Metrics]]) -> Metrics:
    """Average the clients' accuracies, and say them."""
    total = sum(count for count, _ in found)
    accuracy = sum(count * each["accuracy"] for count, each in found) / total
    print("RESULT", json.dumps({"clients": len(found), "accuracy": round(accuracy, 4)}), flush=True)
    return {"accuracy": accuracy}


def server_fn(context: Context) -> ServerAppComponents:
    """Make the strategy."""
    strategy = FedAvg(
        initial_parameters=ndarrays_to_parameters([np.zeros((10, 64)), np.zeros(10)]),
        on_fit_config_fn=lambda server_round: {"rate": 0.1 * server_round},
        evaluate_metrics_aggregation_fn=mean,
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))


app = ServerApp(server_fn=server_fn)
