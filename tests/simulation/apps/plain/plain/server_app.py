"""A server that averages with a strategy chosen by the run config."""

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp import strategy as strategies

from flower_gpu import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    config = context.run_config
    fraction = config["fraction-train"]
    factories = {
        "ours": lambda: FedAvg(fraction_train=fraction, exact_order=True),
        "fedavg": lambda: strategies.FedAvg(fraction_train=fraction),
        "fedadam": lambda: strategies.FedAdam(fraction_train=fraction),
        "derived": lambda: Derived(fraction_train=fraction),
        "krum": lambda: strategies.Krum(num_malicious_nodes=1),
        "adaptive-dp": lambda: strategies.DifferentialPrivacyServerSideAdaptiveClipping(
            strategies.FedAvg(), noise_multiplier=0.1, num_sampled_clients=len(list(grid.get_node_ids()))
        ),
    }
    initial = ArrayRecord([np.zeros(config["elements"], np.float32)])
    options = {"evaluate_fn": evaluate} if config["strategy"] == "ours" else {}
    factories[config["strategy"]]().start(grid, initial, num_rounds=config["num-server-rounds"], **options)


class Derived(strategies.FedAvg):
    """A strategy that may keep state that Flower does not know."""


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Report the model's mean."""
    return MetricRecord({"mean": float(np.mean(arrays.to_numpy_ndarrays()[0]))})
