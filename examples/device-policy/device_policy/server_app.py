"""The server. It prints where each node's call ran, and why."""

import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg


def print_table(results):
    for metrics in sorted((metrics for _, metrics in results), key=lambda metrics: metrics["node"]):
        print("| {node:<10} | {policy:<7} | {ran-on:<14} | {why}".format(**metrics), flush=True)
    return {}


def server_fn(context):
    num_clients = context.run_config["num-clients"]
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=num_clients,
        min_available_clients=num_clients,
        initial_parameters=ndarrays_to_parameters([np.zeros(1, np.float32)]),
        fit_metrics_aggregation_fn=print_table,
    )
    config = ServerConfig(num_rounds=context.run_config["num-server-rounds"])
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)
