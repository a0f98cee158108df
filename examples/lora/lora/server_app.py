"""The server. It averages adapters and evaluates them, also in a worker."""

from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from flower_gpu import gpu_evaluate
from lora import task

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config

    def evaluate(server_round, arrays):
        loss, accuracy = task.test(task.with_adapters(config, arrays), task.load_held_out(128))
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    model = task.with_adapters(config)
    result = FedAvg(fraction_evaluate=0.0).start(
        grid=grid,
        initial_arrays=ArrayRecord(task.adapters(model)),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=gpu_evaluate(evaluate),
    )
    if config["save-adapter-to"]:
        task.with_adapters(config, result.arrays).save_pretrained(config["save-adapter-to"])
