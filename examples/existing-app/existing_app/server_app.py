"""The server. It is unchanged and uses Flower's own FedAvg."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from existing_app import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context):
    config = context.run_config
    torch.manual_seed(config["seed"])
    strategy = FedAvg(fraction_evaluate=config["fraction-evaluate"])
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.Net().state_dict()),
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=global_evaluate,
    )
    if config["save-model-to"]:
        torch.save(result.arrays.to_torch_state_dict(), config["save-model-to"])


def global_evaluate(server_round: int, arrays: ArrayRecord):
    net = task.Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = task.test(net, task.load_held_out())
    return MetricRecord({"loss": loss, "accuracy": accuracy})
