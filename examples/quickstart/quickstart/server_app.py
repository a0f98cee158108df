"""The server. It averages NumPy weights. Workers create the initial weights and evaluate."""

from flwr.server import ServerApp, ServerAppComponents, ServerConfig

from flower_gpu import LegacyFedAvg, gpu_evaluate, run_in_worker


def server_fn(context):
    settings = dict(context.run_config)
    num_rounds, num_clients = settings["num-server-rounds"], settings["num-clients"]
    clients_per_round = settings["clients-per-round"] or num_clients
    strategy = LegacyFedAvg(
        initial_parameters=run_in_worker("quickstart.task:initial_weights", settings, gpu="never"),
        evaluate_fn=gpu_evaluate("quickstart.task:evaluate", kwargs={"settings": settings}, context=context),
        on_fit_config_fn=lambda server_round: {"server-round": server_round},
        fraction_fit=clients_per_round / num_clients,
        min_fit_clients=clients_per_round,
        min_available_clients=num_clients,
        num_rounds=num_rounds,
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=num_rounds))


app = ServerApp(server_fn=server_fn)
