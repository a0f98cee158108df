"""The server. It sees only the sum of the clients' masked models, and adds noise to this sum."""

import numpy as np
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import DifferentialPrivacyClientSideFixedClipping
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp

from flower_gpu import LegacyFedAvg, gpu_evaluate

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    num_rounds, num_clients = config["num-server-rounds"], config["num-clients"]
    averaging = LegacyFedAvg(
        initial_parameters=[np.zeros((10, 64), np.float32), np.zeros(10, np.float32)],
        evaluate_fn=gpu_evaluate("dp_secagg.task:evaluate", context=context),
        on_fit_config_fn=lambda server_round: {"server-round": server_round},
        min_fit_clients=num_clients,
        min_available_clients=num_clients,
        num_rounds=num_rounds,
    )
    with_noise = DifferentialPrivacyClientSideFixedClipping(
        averaging, config["noise-multiplier"], config["clipping-norm"], num_sampled_clients=num_clients
    )
    masked = SecAggPlusWorkflow(
        num_shares=1.0,  # each client's keys are shared among all clients
        reconstruction_threshold=0.67,  # fraction of the shares that recovers the keys of a lost client
        timeout=600,
    )
    legacy = LegacyContext(context, ServerConfig(num_rounds=num_rounds), with_noise)
    DefaultWorkflow(fit_workflow=masked)(grid, legacy)
