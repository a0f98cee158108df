"""A server that averages over a sample of clients."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as strategies

from flower_gpu import FedAvg, FedBuff

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    # Sums lose some of these 64 bits.
    initial = np.random.default_rng(5).normal(size=(8, 32))
    if config["strategy"] == "fedbuff":
        strategy = FedBuff(buffer_size=3, concurrency=4)
        strategy.start(grid, ArrayRecord([initial]), num_rounds=config["num-server-rounds"])
        return
    kind = {
        "ours": FedAvg,
        "median": strategies.FedMedian,
        "fedavg": strategies.FedAvg,
        "fedadam": strategies.FedAdam,
    }[config["strategy"]]
    options = {} if config["strategy"] == "ours" else {"fraction_evaluate": 0.0}
    strategy = kind(fraction_train=config["fraction-train"], **options)
    strategy.start(grid, ArrayRecord([initial]), num_rounds=config["num-server-rounds"])
