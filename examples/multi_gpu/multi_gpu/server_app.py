"""The server. It runs FedAvg. Workers create the initial weights and evaluate, with one GPU."""

from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from flower_gpu import FedAvg, gpu_evaluate, run_in_worker

app = ServerApp()


@app.main()
def main(grid, context):
    config = dict(context.run_config)
    num_clients = config["num-clients"]
    initial = run_in_worker("multi_gpu.task:initial_weights", config, gpu="never")
    strategy = FedAvg(min_train_nodes=num_clients, min_available_nodes=num_clients)
    strategy.start(
        grid,
        ArrayRecord({name: Array(array) for name, array in initial.items()}),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=gpu_evaluate("multi_gpu.task:evaluate", kwargs={"config": config}, context=context),
    )
