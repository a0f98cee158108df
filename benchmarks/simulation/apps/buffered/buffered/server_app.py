"""FedBuff or FedAvg; leaves when each version of the model was there, and its accuracy."""

import json
import time
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_gpu import FedAvg, FedBuff, gpu_evaluate, run_in_worker

app = ServerApp()


class _Noting:
    """Notes when a version is there: a strategy is asked then who evaluates it."""

    def configure_evaluate(self, server_round: int, *rest: Any) -> Any:
        self.__dict__.setdefault("made", []).append(time.time())
        return super().configure_evaluate(server_round, *rest)  # type: ignore[misc]


class _NotingFedAvg(_Noting, FedAvg):
    pass


class _NotingFedBuff(_Noting, FedBuff):
    pass


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    each, clients = config["clients-per-round"], config["num-clients"]
    initial = run_in_worker("buffered.task:initial", data=config["data"], seed=config["seed"])
    if config["kind"] == "fedbuff":
        strategy: Any = _NotingFedBuff(buffer_size=each, concurrency=config["concurrency"])
    else:
        strategy = _NotingFedAvg(each / clients, each, clients)
    began = time.time()
    result = strategy.start(
        grid,
        initial,
        num_rounds=config["num-server-rounds"],
        evaluate_fn=gpu_evaluate("buffered.task:evaluate", kwargs={"data": config["data"]}),
    )
    accuracies = [metrics["accuracy"] for metrics in result.evaluate_metrics_serverapp.values()]
    figures = {"rounds_s": [at - began for at in strategy.made], "began": began, "accuracies": accuracies[1:]}
    Path(config["figures"]).write_text(json.dumps(figures))
