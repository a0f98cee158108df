"""The server. It averages NumPy weights. Workers create the initial weights and evaluate."""

from flwr.server import ServerApp, ServerAppComponents, ServerConfig

from flower_gpu import LegacyFedAvg, gpu_evaluate, run_in_worker


def server_fn(context):
    settings = dict(context.run_config)
    num_rounds, num_clients = settings["num-server-rounds"], settings["num-clients"]
    strategy = LegacyFedAvg(
        initial_parameters=run_in_worker("keras_digits.task:initial_weights", settings, gpu="never"),
        evaluate_fn=gpu_evaluate("keras_digits.task:evaluate", context=context),
        on_fit_config_fn=lambda server_round: {"server-round": server_round},
        min_fit_clients=num_clients,
        min_available_clients=num_clients,
        num_rounds=num_rounds,
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=num_rounds))


app = ServerApp(server_fn=server_fn)
