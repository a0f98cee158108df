"""The result of ``simulate``: its display, rounds, metrics and report."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from html_page import Page

import flower_gpu
from flower_gpu import ClientsFailedError, ConfigError, InvalidResultError, SimulationResult, simulate
from flower_gpu.watch.folds.rounds import RoundPart
from flower_gpu.watch.notebook import result_html

CLIENTS, ROUNDS = 3, 2
server_app, client_app = ServerApp(), ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    arrays = ArrayRecord({"w": Array(np.zeros(50_000, np.float32))})
    FedAvg().start(grid, arrays, num_rounds=ROUNDS)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    metrics = MetricRecord({"num-examples": 1, "train_loss": 0.5})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    if context.node_config["partition-id"] == 2:
        raise RuntimeError("no <data> here")
    metrics = MetricRecord({"num-examples": 1, "loss": 0.25, "accuracy": 0.75, "round": 8.0})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def run(**options: Any) -> SimulationResult:
    apps = (server_app, client_app)
    return simulate(apps, CLIENTS, seed=1, progress=False, start_method="in-process", gpu="never", **options)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> SimulationResult:
    return run(log_dir=tmp_path_factory.mktemp("runs"), verbose=False)


def test_errors_name_the_client_whose_reply_does_not_fit() -> None:
    """They do not name Flower's node id, which means nothing to users."""
    odd = ClientApp()

    @odd.train()
    def train_oddly(message: Message, context: Context) -> Message:
        size = 3 + int(context.node_config["partition-id"] == 1)
        arrays = ArrayRecord({"w": Array(np.zeros(size, np.float32))})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    for strategy in (flower_gpu.FedAvg(exact_order=True), flower_gpu.FedBuff(2, 2)):
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context, strategy: Any = strategy) -> None:
            strategy.start(grid, ArrayRecord({"w": Array(np.zeros(3, np.float32))}), num_rounds=1)

        options = {"progress": False, "start_method": "in-process", "gpu": "never", "log_dir": None}
        with pytest.raises(InvalidResultError, match="array 'w' of client 1 "):
            simulate((server, odd), 2, **options)


def test_fedbuff_names_the_client_that_failed_last() -> None:
    server, failing = ServerApp(), ClientApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = flower_gpu.FedBuff(1, 1)
        strategy.start(grid, ArrayRecord({"w": Array(np.zeros(3, np.float32))}), num_rounds=2)

    @failing.train()
    def fail(message: Message, context: Context) -> Message:
        raise ValueError("no data")

    options = {"progress": False, "start_method": "in-process", "gpu": "never", "log_dir": None}
    with pytest.raises(ClientsFailedError, match=r"The last failure is that of client [01]: .*no data"):
        simulate((server, failing), 2, keep_going=True, **options)


def test_rounds_are_a_key_of_the_run_config() -> None:
    assert run(log_dir=None, rounds=1).context.run_config["num-server-rounds"] == 1
    with pytest.raises(
        ConfigError, match="rounds and run_config num-server-rounds give the same setting twice"
    ):
        run(log_dir=None, rounds=1, run_config={"num-server-rounds": 1})


def test_a_process_simulates_one_run_at_a_time() -> None:
    """Two runs would mix environment variables and patches of Flower's classes."""
    begin, start = dict(os.environ), FedAvg.start
    refused: list[str] = []

    def second() -> None:
        with pytest.raises(ConfigError) as refusal:
            simulate((server_app, client_app), 1, log_dir=None, progress=False)
        refused.append(str(refusal.value))

    outer = ServerApp()

    @outer.main()
    def main(grid: Grid, context: Context) -> None:
        # Once in a ServerApp, and once in another thread.
        second()
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        raise LookupError("the first one ends")

    # After the end of a run another run may start.
    for _ in range(2):
        with pytest.raises(LookupError):
            simulate((outer, client_app), 1, log_dir=None, progress=False, start_method="in-process")
    assert len(refused) == 4 and all("one at a time" in text for text in refused)
    assert dict(os.environ) == begin and FedAvg.start is start


def test_the_repr_is_short(result: SimulationResult) -> None:
    text = repr(result)
    assert text.startswith("<SimulationResult app; 3 clients; 2 of 2 rounds; completed, 2 of 12 messages")
    assert "evaluate: loss 0.25, accuracy 0.75" in text and str(result.folder) in text
    assert len(text.splitlines()) == 1


def test_rounds_and_metrics(result: SimulationResult, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = [(part.round, part.task, part.messages, part.failed) for part in result.history]
    of_round = [("train", 3, 0), ("evaluate", 3, 1)]
    assert phases == [(number, *part) for number in (1, 2) for part in of_round]

    table = result.metrics
    assert list(table.columns[:5]) == ["round", "task", "messages", "failed", "seconds"]
    evaluated = table[table["task"] == "evaluate"]
    assert evaluated["accuracy"].tolist() == [0.75, 0.75] and evaluated["round"].tolist() == [1, 2]
    assert evaluated["metrics.round"].tolist() == [8.0, 8.0]

    # Act as if pandas were not installed.
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = result.metrics
    assert [row["task"] for row in rows] == table["task"].tolist()
    assert rows[1]["loss"] == 0.25 and "loss" not in rows[0]


def test_a_notebook_shows_a_table(result: SimulationResult) -> None:
    html = result._repr_html_()
    texts = Page(html).words
    assert html.count("<tr>") == 1 + ROUNDS
    assert texts.index("accuracy") < texts.index("loss")
    assert "RuntimeError: no <data> here" in "".join(texts)


@pytest.mark.parametrize(("rounds", "rows"), [(0, 0), (1, 2), (12, 13), (500, 14)])
def test_the_table_shows_any_number_of_rounds(result: SimulationResult, rounds: int, rows: int) -> None:
    parts = [
        RoundPart(0.0, number, "server-evaluate", metrics={"<b>": number - 1, "f1": 0.0}, seconds=1.0)
        for number in range(rounds)
    ]
    html = result_html("an\x1bapp", result.summary, "", parts)
    assert Page(html).words[0] == "an?app"
    assert html.count("<tr>") == rows
    assert len(html) < 50_000


def test_the_report_can_be_shown_in_a_notebook(result: SimulationResult) -> None:
    page = result.report()
    assert page == Path(result.folder or "") / "report.html" and "<html" in page.read_text()
    shown: str = page._repr_html_()  # type: ignore[attr-defined]
    assert shown.startswith('<iframe srcdoc="&lt;!DOCTYPE html')
    page.unlink()
    assert page._repr_html_() is None  # type: ignore[attr-defined]


def test_flowers_log_lines_are_in_the_log_file(result: SimulationResult) -> None:
    assert result.folder is not None
    log = (result.folder / "run.log").read_text()
    assert "INFO Starting FedAvg strategy" in log and "[ROUND 2/2]" in log


def test_a_run_without_a_folder_has_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(log_dir=None, verbose=False)
    assert len(result.history) == 4 and "<table" in result._repr_html_()
    with pytest.raises(ConfigError, match=r"there is no report of this run.*log_dir=None"):
        result.report()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("app", "options", "words"),
    [
        ((server_app, client_app), {"run_config": [1]}, "run_config must be a mapping .* not a list"),
        (3, {}, "an app is a folder, or a ServerApp and a ClientApp, not a int"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(app: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        simulate(app, 1, log_dir=None, progress=False, **options)
