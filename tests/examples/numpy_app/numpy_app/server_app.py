import numpy as np
from flwr.server import ServerApp, ServerAppComponents, ServerConfig

from flower_gpu import LegacyFedAvg


def server_fn(context):
    num_rounds, num_clients = context.run_config["num-server-rounds"], context.run_config["num-clients"]
    strategy = LegacyFedAvg(
        evaluate_fn="numpy_app.task:evaluate",
        initial_parameters=[np.zeros(3, np.float32)],
        min_fit_clients=num_clients,
        min_available_clients=num_clients,
        num_rounds=num_rounds,
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=num_rounds))


app = ServerApp(server_fn=server_fn)
