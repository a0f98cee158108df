"""A client that counts its rounds in its state, and writes its node config and run config to its log."""

import json
import time

from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ConfigRecord, Context


class TinyClient(NumPyClient):
    def __init__(self, context: Context) -> None:
        self.context = context

    def fit(self, parameters, config):
        state = self.context.state
        rounds = state["rounds"]["count"] + 1 if "rounds" in state else 1
        state["rounds"] = ConfigRecord({"count": rounds})
        run_config = self.context.run_config
        print("given", json.dumps([dict(self.context.node_config), dict(run_config), rounds]))
        time.sleep(run_config["seconds"])
        if run_config["fail"] == "client" and self.context.node_config["partition-id"] == 1:
            raise RuntimeError("client 1 fails on purpose")
        return [array + 1 for array in parameters], 10, {}


def client_fn(context: Context):
    return TinyClient(context).to_client()


app = ClientApp(client_fn)
