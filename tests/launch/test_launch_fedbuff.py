"""FedBuff on SuperNodes: neither the rounds nor the end of the run wait for a client that never replies."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import launcher
from scripted_app import write_app

APP = """
import time

from flower_gpu import FedBuff


@client.train()
def train(message, context):
    if context.node_config["partition-id"] == 0:
        time.sleep(3600)
    if context.node_config["partition-id"] == 1 and message.content["config"]["server-round"] == 2:
        raise ValueError("out of luck")
    arrays = [array + 1 for array in message.content["arrays"].to_numpy_ndarrays()]
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


@server.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    strategy = FedBuff(buffer_size=2, concurrency=4, server_learning_rate=0.5, staleness=lambda behind: 1)
    result = strategy.start(grid, ArrayRecord([np.zeros(2, np.float32)]), num_rounds=rounds)
    print("the model is", result.arrays.to_numpy_ndarrays()[0].tolist())
"""


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_client_that_never_replies_does_not_delay_the_run(tmp_path: Path) -> None:
    app = tmp_path / "patient"
    write_app(app, APP, config="num-server-rounds = 3")
    done = launcher(tmp_path)(app, "--clients", "4", "--gpu", "never")
    assert done.code == 0, done.output + done.logs()
    # Each client's update is 1, whatever model version it trained. Three rounds add half of it each.
    assert "the model is [1.5, 1.5]" in done.log("run")
    parts = [part for part in done.history.rounds.parts if part.task == "train"]
    assert [part.messages - part.failed for part in parts] == [2, 2, 2]
    assert done.result["failed"] == sum(part.failed for part in parts) <= 1
    failed = {event["node"] for event in done.events("reply") if event["error"]}
    assert len(failed) <= 1
