"""A client as people write them, some of which fail, and the server's evaluation."""

import os
import signal
import time

import numpy as np
from flwr.client import NumPyClient

TRUE_WEIGHTS = np.array([2.0, -1.0, 0.5], np.float32)


def data(seed):
    inputs = np.random.default_rng(seed).normal(size=(100, 3)).astype(np.float32)
    return inputs, inputs @ TRUE_WEIGHTS


class RegressionClient(NumPyClient):
    def __init__(self, partition):
        self.partition = partition

    def fit(self, parameters, config):
        if self.partition == 1:
            print("this client dies now", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.partition == 2:
            raise ValueError("the data are gone")
        if self.partition == 3:
            time.sleep(600)
        (weights,) = parameters
        inputs, targets = data(self.partition)
        for _ in range(20):
            weights = weights - 0.1 * inputs.T @ (inputs @ weights - targets) / len(targets)
        return [weights.astype(np.float32)], len(targets), {"pid": os.getpid()}


def evaluate(server_round, weights, config):
    inputs, targets = data(1000)
    loss = float(np.mean((inputs @ weights[0] - targets) ** 2))
    return loss, {"accuracy": float(loss < 0.01)}
