import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp

from flower_gpu import FedAvg

app = ServerApp()


def global_evaluate(server_round, arrays):
    return MetricRecord({"loss": float(arrays["w"].numpy().mean()), "accuracy": 0.5})


@app.main()
def main(grid, context):
    arrays = ArrayRecord({"w": Array(np.zeros(4, np.float32)), "steps": Array(np.array(0, np.int64))})
    num_clients = context.run_config["num-clients"]
    result = FedAvg(min_train_nodes=num_clients, min_available_nodes=num_clients).start(
        grid,
        arrays,
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )
    steps = result.arrays["steps"].numpy()
    print(f"steps: {steps} {steps.dtype}; evaluated by clients: {len(result.evaluate_metrics_clientapp)}")
