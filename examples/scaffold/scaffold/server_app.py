"""The server. It runs FedAvg with messages that also contain the server's control variate."""

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp

from flower_gpu import FedAvg, gpu_evaluate, run_in_worker

app = ServerApp()


class Scaffold(FedAvg):
    """SCAFFOLD with a global learning rate of 1 (Karimireddy et al., 2020, arXiv 1910.06378)."""

    def __init__(self, num_clients, **options):
        super().__init__(weighted_by_key="weight", **options)
        self.num_clients = num_clients
        self.control = {}

    def configure_train(self, server_round, arrays, config, grid):
        if not self.control:
            self.control = {name: np.zeros_like(array.numpy()) for name, array in arrays.items()}
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            message.content["control"] = record(self.control)
        return messages

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for reply in replies:
            if reply.has_content():  # a failed client has not changed its control variate
                for name, array in reply.content.pop("control-change").items():
                    self.control[name] = self.control[name] + array.numpy() / self.num_clients
        return super().aggregate_train(server_round, replies)


def record(arrays):
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


@app.main()
def main(grid, context):
    config = context.run_config
    num_clients = config["num-clients"]
    clients_per_round = config["clients-per-round"] or num_clients
    sampling = {
        "fraction_train": clients_per_round / num_clients,
        "min_train_nodes": clients_per_round,
        "min_available_nodes": num_clients,
    }
    if config["algorithm"] == "scaffold":
        strategy = Scaffold(num_clients, **sampling)
    else:
        strategy = FedAvg(weighted_by_key="weight", **sampling)
    strategy.start(
        grid,
        record(run_in_worker("scaffold.task:initial_weights", seed=config["seed"], gpu="never")),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=gpu_evaluate("scaffold.task:evaluate", context=context),
    )
    if config["algorithm"] == "scaffold":
        compare_control_variates(grid, strategy)


def compare_control_variates(grid, strategy):
    """Print the difference between the server's control variate and the mean of the clients' variates."""
    questions = [
        Message(RecordDict(), dst_node_id=node_id, message_type=MessageType.QUERY)
        for node_id in grid.get_node_ids()
    ]
    replies = list(grid.send_and_receive(questions))
    for reply in replies:
        if reply.has_error():
            print(f"a client did not tell what it kept: {reply.error.reason}")
            return
    # A client that never trained has no control variate, which counts as zeros.
    kept = [reply.content for reply in replies if "control" in reply.content]
    rounds = sorted(state["rounds"]["trained"] for state in kept)
    largest = max(np.abs(array).max() for array in strategy.control.values())
    apart = max(
        np.abs(sum(state["control"][name].numpy() for state in kept) / strategy.num_clients - array).max()
        for name, array in strategy.control.items()
    )
    print(f"rounds that clients trained, by what they kept: {rounds}")
    print(f"control variates: server's largest {largest:.3f}, clients' mean differs by {apart:.1e}")
