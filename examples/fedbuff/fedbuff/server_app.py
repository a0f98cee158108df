"""The server. It runs FedBuff, or FedAvg for comparison."""

from flwr.serverapp import ServerApp

from flower_gpu import FedAvg, FedBuff, gpu_evaluate, run_in_worker

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    num_clients = config["num-clients"]
    clients_per_round = min(config["clients-per-round"], num_clients)
    if config["strategy"] == "fedbuff":
        concurrency = min(config["concurrency"], num_clients)
        strategy = FedBuff(buffer_size=clients_per_round, concurrency=concurrency)
    else:
        strategy = FedAvg(clients_per_round / num_clients, clients_per_round, num_clients)
    strategy.start(
        grid,
        run_in_worker("fedbuff.task:initial_model", seed=config["seed"], gpu="never"),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=gpu_evaluate("fedbuff.task:evaluate"),
    )
