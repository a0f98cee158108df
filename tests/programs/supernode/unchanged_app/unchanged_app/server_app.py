"""The server runs FedAvg and logs to a file."""

import logging
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from unchanged_app.task import Net

app = ServerApp()


class Strategy(FedAvg):
    """FedAvg that writes a line to the log after each round."""

    def __init__(self, log_file: str, **options):
        super().__init__(**options)
        self.log_file = log_file

    def aggregate_evaluate(self, server_round, replies):
        metrics = super().aggregate_evaluate(server_round, replies)
        if self.log_file:
            with Path(self.log_file).open("a") as log:
                log.write(f"round {server_round} has ended\n")
        return metrics


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    clients = settings["num-clients"]
    if settings["log-file"]:
        logging.getLogger("flwr").addHandler(logging.FileHandler(settings["log-file"]))
    strategy = Strategy(
        settings["log-file"], fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": settings["learning-rate"]}),
        num_rounds=settings["num-server-rounds"],
    )
    losses = {number: metrics["train_loss"] for number, metrics in result.train_metrics_clientapp.items()}
    print(f"train losses: {losses}", flush=True)
