import os
import signal
import time

from flwr.client import NumPyClient


class Client(NumPyClient):
    def __init__(self, partition):
        self.partition = partition

    def fit(self, parameters, config):
        if self.partition == 1:
            raise ValueError("the data are gone")
        if self.partition == 2:
            print("these are the last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.partition == 3:
            time.sleep(600)
        return [array + 1 for array in parameters], 1, {}


def evaluate(server_round, weights, config):
    return float(weights[0].mean()), {}
