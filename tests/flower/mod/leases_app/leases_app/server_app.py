import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp

from flower_gpu import FedAvg, gpu_evaluate

app = ServerApp()


def global_evaluate(server_round, arrays):
    return MetricRecord({"loss": float(arrays["w"].numpy().mean()), "accuracy": 0.5})


@app.main()
def main(grid, context):
    clients = context.run_config["num-clients"]
    arrays = ArrayRecord({"w": Array(np.zeros(4, np.float32)), "steps": Array(np.array(0, np.int64))})
    result = FedAvg(min_train_nodes=clients, min_available_nodes=clients).start(
        grid,
        arrays,
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=gpu_evaluate(global_evaluate, gpu="never"),
    )
    steps = result.arrays["steps"].numpy()
    print(f"steps: {steps} {steps.dtype}; evaluated by clients: {len(result.evaluate_metrics_clientapp)}")
    for server_round, metrics in result.train_metrics_clientapp.items():
        print(f"round {server_round}: state has counted {metrics['rounds']:.4f} rounds")
