import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    clients = context.run_config["num-clients"]
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    arrays = ArrayRecord({"w": Array(np.zeros(4, np.float32))})
    result = strategy.start(grid, arrays, num_rounds=context.run_config["num-server-rounds"])
    print(f"weights: {result.arrays['w'].numpy().tolist()}")
    for server_round, metrics in result.train_metrics_clientapp.items():
        print(f"round {server_round}: state has counted {metrics['rounds']:.4f} rounds")
