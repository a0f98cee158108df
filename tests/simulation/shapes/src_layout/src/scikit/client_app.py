"""A client of the older kind: a NumPyClient that client_fn makes."""

import numpy as np
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Context
from sklearn.metrics import log_loss

from scikit.task import data, fitted, model_with


class ScikitClient(NumPyClient):
    """Has its part of the images."""

    def __init__(self, part: int) -> None:
        self.part = part

    def fit(self, parameters: list[np.ndarray], config: dict) -> tuple[list[np.ndarray], int, dict]:
        """Fit on the own images."""
        return fitted(parameters, self.part), len(data(self.part)[1]), {"rate": config["rate"]}

    def evaluate(self, parameters: list[np.ndarray], config: dict) -> tuple[float, int, dict]:
        """Evaluate on the own images."""
        inputs, targets = data(self.part)
        model = model_with(parameters)
        loss = log_loss(targets, model.predict_proba(inputs), labels=np.arange(10))
        return loss, len(targets), {"accuracy": model.score(inputs, targets)}


def client_fn(context: Context) -> Client:
    """Make the client of a partition."""
    return ScikitClient(int(context.node_config["partition-id"])).to_client()


app = ClientApp(client_fn=client_fn)
