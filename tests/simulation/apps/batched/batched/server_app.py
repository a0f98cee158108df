"""A server that runs some rounds with all clients."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

import flower_gpu
from batched.networks import NETWORKS

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(5)
    network = NETWORKS[str(context.run_config["network"])]()
    rounds = context.run_config["num-server-rounds"]
    flower_gpu.FedAvg().start(grid, ArrayRecord(network.state_dict()), num_rounds=rounds)
