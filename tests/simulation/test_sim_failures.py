"""Clients that fail in simulations: how failures are reported, and when they end the run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_programs
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server import strategy as legacy
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from recorded_apps import CLIENTS, Clients, initial_arrays, new_nodes, run_reported
from scripted_app import APP
from simulations import run

from flower_gpu import FedBuff
from flower_gpu.apps.folder import RunFolder
from flower_gpu.errors import ClientsFailedError

pytestmark = pytest.mark.timeout(300)

MISSPELT = ("--run-config", "train-fails-on='all'")
ALL = "all 6 clients failed in round 1; the first traceback is above"
LINE = next(
    number
    for number, line in enumerate((APP / "scripted" / "client_app.py").read_text().splitlines(), start=1)
    if "Nett()" in line
)
PLACE = re.compile(rf'File ".*scripted/client_app.py", line {LINE}, in train')


def test_a_run_whose_clients_all_fail_ends_at_once_and_can_be_resumed_when_fixed(tmp_path: Path) -> None:
    done = run("plain", 6, tmp_path, "--seed", "3", *MISSPELT)
    assert done.status == 1, done.output
    (sentence,) = (line for line in done.output.splitlines() if ALL in line and "simulate:" in line)
    assert sentence == f"flower-gpu simulate: {ALL}"
    assert len(PLACE.findall(done.output)) == 1 and done.output.count("NameError: name 'Nett'") >= 1
    kept = (done.folder / "failures.log").read_text()
    assert PLACE.search(kept) and kept.count("train of client") >= 6
    assert all(f"train of client {client} failed in round 1" in kept for client in range(6))
    assert done.summary["outcome"] == "failed" and ALL in done.summary["error"]
    assert done.summary["messages"] == done.summary["failed"] == 6
    assert "--resume" in done.output
    again = run("plain", 6, tmp_path, "--run-config", "train-fails-on=''", "--resume", str(done.folder))
    assert again.status == 0, again.output
    assert again.summary["outcome"] == "completed" and again.summary["rounds_finished"] == 2


def test_keep_going_continues_a_run_whose_clients_all_fail(tmp_path: Path) -> None:
    done = run("plain", 6, tmp_path, "--keep-going", *MISSPELT)
    assert done.status == 0, done.output
    assert re.search(r"^outcome +completed, 12 of 12 messages failed$", done.output, re.MULTILINE)
    assert len(PLACE.findall(done.output)) == 1


def run_in(folder: RunFolder, main: Any, handle: Callable[[Message], Message]) -> dict[str, Any]:
    return run_reported(folder, main, handle, new_nodes()).summary


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs")


def always_fail(message: Message) -> Message:
    raise ValueError("of the app")


def with_flowers_strategy(grid: Any, context: Any) -> None:
    FedAvg().start(grid, initial_arrays(), num_rounds=3)


def components(context: Any) -> ServerAppComponents:
    strategy = legacy.FedAvg(initial_parameters=ndarrays_to_parameters([np.zeros(3)]))
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=3))


def with_send_and_receive(grid: Any, context: Any) -> None:
    for server_round in range(1, 4):
        messages = [
            Message(RecordDict({"c": ConfigRecord({"server-round": server_round})}), node, "train")
            for node in grid.get_node_ids()
        ]
        list(grid.send_and_receive(messages))


def with_pull_messages(grid: Any, context: Any) -> None:
    for _ in range(3):
        ids = set(grid.push_messages(Message(RecordDict(), node, "query") for node in grid.get_node_ids()))
        while ids:
            ids -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(ids)}


def with_a_broad_except(grid: Any, context: Any) -> None:
    for _ in range(3):
        try:
            list(
                grid.send_and_receive([Message(RecordDict(), node, "query") for node in grid.get_node_ids()])
            )
        except Exception:
            continue


@pytest.mark.parametrize(
    ("main", "text"),
    [
        (with_flowers_strategy, "all 6 clients failed in round 1"),
        (ServerApp(server_fn=components), "all 6 clients failed in round 1"),
        (with_send_and_receive, "all 6 clients failed in round 1"),
        (with_pull_messages, "all 6 clients failed in the first round"),
        (with_a_broad_except, "all 6 clients failed in the first round"),
    ],
)
def test_the_run_ends_with_a_server_of_any_kind(main: Any, text: str, folder: RunFolder) -> None:
    with pytest.raises(ClientsFailedError, match=text):
        run_in(folder, main, always_fail)
    failed = [line for line in folder.failures.read_text().splitlines() if line.startswith("20")]
    assert len(failed) == CLIENTS and len({line.split("client ")[1][0] for line in failed}) == CLIENTS


def test_failures_of_single_messages_are_judged_when_the_run_is_over(folder: RunFolder) -> None:
    def one_by_one(grid: Any, context: Any) -> None:
        for node in grid.get_node_ids():
            list(grid.send_and_receive([Message(RecordDict(), node, "query")]))

    with pytest.raises(ClientsFailedError, match="all 6 messages failed"):
        run_in(folder, one_by_one, always_fail)


def test_late_replies_do_not_end_the_run(folder: RunFolder) -> None:
    def with_a_short_timeout(grid: Any, context: Any) -> None:
        for _ in range(2):
            messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
            list(grid.send_and_receive(messages, timeout=0.05))

    summary = run_in(folder, with_a_short_timeout, Clients(new_nodes(), pause_s=0.3))
    assert summary["outcome"].startswith("completed, ")
    assert "no reply within 0.05 s" in folder.failures.read_text()


@pytest.mark.parametrize("strategy", [FedAvg(fraction_evaluate=0.0), FedBuff(buffer_size=2, concurrency=4)])
def test_a_strategy_that_gets_only_late_replies_does_not_complete(
    strategy: FedAvg, folder: RunFolder
) -> None:
    def with_a_short_timeout(grid: Any, context: Any) -> None:
        strategy.start(grid, initial_arrays(), num_rounds=2, timeout=0.05)

    with pytest.raises(ClientsFailedError, match=r"no client has sent an update|all \d+ messages failed"):
        run_in(folder, with_a_short_timeout, Clients(new_nodes(), pause_s=0.5))
    assert "no reply within 0.05 s" in folder.failures.read_text()


ODD_REPLIES = """
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flower_gpu import simulate

server, client = ServerApp(), ClientApp()


@server.main()
def main(grid, context):
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(3)]), num_rounds=1)


@client.train()
def train(message, context):
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    reply = Message(RecordDict(content), reply_to=message)
    partition = context.node_config["partition-id"]
    if partition == 4:
        reply.metadata.__dict__["_src_node_id"] += 1
    if partition == 5:
        reply.metadata.message_type = "train.other"
    new = Message(RecordDict(), dst_node_id=message.metadata.src_node_id, message_type="train")
    return [message, None, {"a": 1}, new, reply, reply, reply][partition]


summary = simulate((server, client), 7, log_dir=None).summary
for reason in summary["failures"]:
    print(reason["count"], sorted(entry["client"] for entry in reason["messages"]), reason["reason"])
"""


def test_an_invalid_reply_fails_only_its_client(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ODD_REPLIES)
    done = run_programs.run([sys.executable, str(script)])
    assert done.returncode == 0, done.stderr
    rest = "return Message(content, reply_to=message), with the message that the function was given"
    end = "end it with return Message(content, reply_to=message)"
    assert sorted(done.stdout.splitlines()) == [
        f"1 [0] the function returned the message that it was given: {rest}",
        f"1 [1] the function returned nothing, not a Message: {end}",
        f"1 [2] the function returned a dict, not a Message: {end}",
        f"2 [3, 4] the function returned a Message that is not a reply to it: {rest}",
    ]


LONG_TEXTS = """
import sys
import numpy as np
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flower_gpu import progress, simulate

server, client = ServerApp(), ClientApp()
LONG = 5_000_000


class OddError(Exception):
    def __str__(self):
        return "o" * LONG


@server.main()
def main(grid, context):
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord([np.zeros(3)]), num_rounds=1)


@client.train()
def train(message, context):
    partition = context.node_config["partition-id"]
    if partition == 0:
        raise ValueError("v" * LONG)
    if partition == 1:
        raise OddError
    if partition == 2:
        try:
            raise KeyError("k" * LONG)
        except KeyError as error:
            error.add_note("n" * LONG)
            raise RuntimeError("short") from error
    if partition == 3:
        return Message(Error(1, "e" * LONG), reply_to=message)
    list(progress([1], desc="d" * LONG))
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


simulate((server, client), 5, log_dir=sys.argv[1])
"""


def test_long_texts_are_cut_wherever_they_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LONG_TEXTS)
    done = run_programs.run([sys.executable, str(script), str(tmp_path / "runs")])
    assert done.returncode == 0, done.stderr[-5000:]
    (folder,) = (tmp_path / "runs").iterdir()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert max(sizes.values()) < 200_000, sizes
    assert len(done.stdout) + len(done.stderr) < 400_000
    kept = (folder / "failures.log").read_text()
    assert kept.count(" failed in round 1") == 4 and kept.count("characters left out") >= 5
    for text in ("in train", "ValueError: vvv", "ooo", "KeyError: 'kkk", "nnn", "RuntimeError: short", "eee"):
        assert text in kept, text
