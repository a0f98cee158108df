"""Trees instead of weights: the model is JSON in an array of bytes, and Flower's strategy bags the trees."""

import json

import numpy as np
import xgboost
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedXgbBagging
from sklearn.datasets import load_digits

client_app = ClientApp()
server_app = ServerApp()
# With a base score, the model does not depend on which client's reply arrives first.
PARAMS = {
    "objective": "multi:softmax",
    "num_class": 10,
    "max_depth": 4,
    "nthread": 1,
    "seed": 1,
    "base_score": 0.5,
}


def data(part: int, parts: int) -> xgboost.DMatrix:
    """Return every ``parts``-th image."""
    digits = load_digits()
    return xgboost.DMatrix(digits.data[part::parts], label=digits.target[part::parts])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Add a tree for each class."""
    client_data = data(int(context.node_config["partition-id"]), 4)
    model = xgboost.Booster(params=PARAMS)
    received = message.content["arrays"]["0"].numpy().tobytes()
    if received:
        model.load_model(bytearray(received))
        before = model.num_boosted_rounds()
        model.update(client_data, before)
        model = model[before:]
    else:
        model = xgboost.train(PARAMS, client_data, num_boost_round=1)
    arrays = ArrayRecord([np.frombuffer(model.save_raw("json"), dtype=np.uint8)])
    metrics = MetricRecord({"num-examples": client_data.num_row()})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate all trees on the client's own images."""
    client_data = data(int(context.node_config["partition-id"]), 4)
    model = xgboost.Booster(params=PARAMS)
    model.load_model(bytearray(message.content["arrays"]["0"].numpy().tobytes()))
    accuracy = float(np.mean(model.predict(client_data) == client_data.get_label()))
    metrics = MetricRecord({"num-examples": client_data.num_row(), "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Bag two rounds of trees."""
    start = ArrayRecord([np.frombuffer(b"", dtype=np.uint8)])
    result = FedXgbBagging().start(grid, start, num_rounds=2, train_config=ConfigRecord())
    accuracies = [
        round(dict(metrics)["accuracy"], 4) for metrics in result.evaluate_metrics_clientapp.values()
    ]
    print("RESULT", json.dumps({"accuracies": accuracies}), flush=True)
