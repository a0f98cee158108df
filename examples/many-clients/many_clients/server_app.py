"""The server. It runs FedAvg with all clients in each round. Only workers import torch."""

from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from flower_gpu import FedAvg, gpu_evaluate, run_in_worker

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    network = config["network"]
    model = run_in_worker("many_clients.task:initial_model", network, config["seed"], gpu="never")
    FedAvg().start(
        grid,
        ArrayRecord({name: Array(value) for name, value in model.items()}),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=gpu_evaluate("many_clients.task:evaluate", kwargs={"network": network}, context=context),
    )
