"""A server that writes a trace event after each round."""

import numpy as np
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from flower_gpu import trace


def server_fn(context: Context) -> ServerAppComponents:
    run_config = context.run_config
    num_rounds, clients = run_config["num-server-rounds"], run_config["num-clients"]
    if run_config["fail"] == "server_fn":
        raise RuntimeError("server_fn fails on purpose")

    def evaluate(server_round, parameters, config):
        if run_config["fail"] == "evaluate" and server_round == 1:
            raise RuntimeError("the evaluation fails on purpose")
        loss = 1.0 / (1.0 + float(parameters[0].sum()))
        metrics = {"loss": loss, "accuracy": 1.0 - loss}
        trace.write("round", round=server_round, num_rounds=num_rounds, metrics=metrics)
        return loss, {}

    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_evaluate_clients=0,
        min_available_clients=clients,
        evaluate_fn=evaluate,
        initial_parameters=ndarrays_to_parameters([np.zeros(1, np.float32)]),
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=num_rounds))


app = ServerApp(server_fn=server_fn)
