"""The server. It averages arrays. Workers create the initial weights and evaluate."""

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp

from flower_gpu import FedAvg, gpu_evaluate, run_in_worker

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    initial = run_in_worker("jax_digits.task:initial_weights", config["seed"], gpu="never")
    FedAvg(min_train_nodes=config["num-clients"], min_available_nodes=config["num-clients"]).start(
        grid,
        ArrayRecord(initial),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=gpu_evaluate("jax_digits.task:evaluate", context=context),
    )
