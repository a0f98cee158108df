import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    clients = context.run_config["num-clients"]
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy = DifferentialPrivacyClientSideFixedClipping(
        inner, noise_multiplier=1e-6, clipping_norm=2.0, num_sampled_clients=clients
    )
    arrays = ArrayRecord({"w": Array(np.zeros(4, np.float32))})
    result = strategy.start(grid, arrays, num_rounds=context.run_config["num-server-rounds"])
    weights = result.arrays["w"].numpy()
    print(f"norm: {np.linalg.norm(weights):.3f}, noise: {bool(len(set(weights.tolist())) > 1)}")
    print(f"in workers: {result.train_metrics_clientapp[1]['is-worker']}")
