"""Settings of single clients of a simulation."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from nvml_stub import GIB
from simulations import run
from stub_host import StubHost
from stub_host import events as events_of

from flower_gpu.errors import ConfigError
from flower_gpu.flower import message_call
from flower_gpu.simulation.clients import KEYS, Clients
from flower_gpu.simulation.in_worker import handle
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.watch.report.page import write_report
from flower_gpu.workers import events

COUNT = 24
PATTERNS = {
    "*": range(COUNT),
    "*/5": range(0, COUNT, 5),
    7: [7],
    "3-11": range(3, 12),
    "2-20/6": range(2, 21, 6),
    "1, 5,9-10": [1, 5, 9, 10],
    "23": [23],
}


@pytest.mark.parametrize("seed", range(20))
def test_the_last_entry_that_names_a_client_counts_key_by_key(seed: int) -> None:
    chosen = random.Random(seed)
    patterns: list[Any] = chosen.sample(list(PATTERNS), chosen.randint(1, len(PATTERNS)))
    keys = ("slow-down", "timeout_s")
    entries = {
        pattern: {key: chosen.randint(1, 9) for key in keys if chosen.random() < 0.7} for pattern in patterns
    }
    clients = Clients.of(entries, COUNT)
    for partition in range(COUNT):
        expected: dict[str, int] = {}
        for pattern in patterns:
            if partition in PATTERNS[pattern]:
                expected |= {key.replace("-", "_"): value for key, value in entries[pattern].items()}
        assert clients.of_client(partition) == expected
    settings_by_client = [clients.of_client(partition) for partition in range(COUNT)]
    assert len({id(client_settings) for client_settings in settings_by_client}) == len(
        {tuple(sorted(client_settings.items())) for client_settings in settings_by_client}
    )
    limits = {client_settings.get("timeout_s") for client_settings in settings_by_client}
    assert sorted(map(str, limits)) == sorted(
        str(client_settings.get("timeout_s")) for client_settings in clients.resources()
    )


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"*": {"slow-dwon": 2}}, r'\["\*"\] slow-dwon: there is no such key; .*slow-down'),
        ({"20-24": {"slow-down": 2}}, "names client 24, and there are 24, from 0 to 23"),
        ({24: {}}, "names client 24"),
        ({"9-3": {}}, "no clients: a range goes up"),
        ({"*/0": {}}, "smallest step"),
        ({"-1": {}}, "names no clients"),
        ({True: {}}, "names no clients"),
        ({"slow-down": 2}, "must be a table: write keys below a heading"),
        ({"1": {"slow-down": 0.5}}, "slow-down must be a number from 1 to 1000000, not 0.5"),
        ({"1": {"slow-down": "2"}}, "slow-down must be a number"),
        ({"1": {"slow-down": True}}, "slow-down must be a number"),
        ({"1": {"slow-down": 2, "slow_down": 3}}, "give one of the two"),
        ({"1": {"num-gpus": 0.5, "gpu-memory": "2GiB"}}, "gpu-memory: num-gpus is given as well"),
    ],
)
def test_unusable_entries_are_errors(entries: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Clients.of(entries, COUNT)


def test_the_docs_reference_has_all_keys() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "simulate.md").read_text()
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert all(f"`{key.replace('_', '-')}`" in rows for key in KEYS)


@pytest.mark.timeout(200)
def test_a_slow_client_takes_longer_within_an_equally_longer_time_limit(tmp_path: Path) -> None:
    table = tmp_path / "devices.toml"
    table.write_text('["*"]\ntimeout-s = 60\n[1]\nslow-down = 20\n[2]\nslow-down = 1e6\ntimeout-s = 2\n')
    options = ("--clients-table", str(table), "--run-config", "num-server-rounds=2")
    done = run("plain", 3, tmp_path / "runs", *options)
    assert done.status == 0, done.output
    seconds: dict[str, list[float]] = {}
    for call in done.calls:
        if call["task"] == "train" and call["outcome"] == "ok":
            seconds.setdefault(call["client"], []).append(call["result_at"] - call["task_at"])
    assert sorted(seconds) == ["0", "1"]
    late = [call for call in done.calls if call["client"] == "2"]
    assert {call["outcome"] for call in late} == {"timeout"} and min(call["seconds"] for call in late) > 1
    assert done.summary["settings"]["clients_table"]["1"] == {"slow-down": 20}
    page = write_report(done.folder).read_text()
    assert "timeout-s 60, slow-down 20" in page and "timeout-s 2, slow-down 1000000.0" in page


def test_imports_do_not_count_for_a_slow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(1)\nimport part_of_slow_library\n")
    (tmp_path / "part_of_slow_library.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        import_module("slow_library")
        return Message(RecordDict(), reply_to=message)

    nodes = VirtualNodes(1, 0, 5, {})
    message_call.assume({"_run_id": 5, "_node_id": 1, "_task_id": 1})
    message = Message(RecordDict(), nodes.ids[0], "train")
    with events.SeenImports(lambda _: None, None):
        contexts = [nodes.context_of(nodes.ids[0], b"")]
        handle(app, [1], 200.0, [message], contexts, message_call.identity())
    assert "slow_library" in sys.modules


@pytest.mark.timeout(200)
def test_each_call_has_a_lease_of_its_clients_size(tmp_path: Path) -> None:
    """This also holds for a reused worker, whose lease was that of the previous client."""
    # The GPU has 16 GiB.
    host = StubHost(tmp_path, gpus=1)
    table = tmp_path / "devices.toml"
    table.write_text(
        '["*"]\nnum-gpus = 0.25\n[0]\nnum-gpus = 1\n["1,5"]\ngpu-memory = "6GiB"\nnum-cpus = 1\n'
    )
    options = ("--gpu", "require", "--num-gpus", "0.5", "--clients-table", str(table), "--max-workers", "3")
    done = host.simulate(8, *options, "--run-config", "num-server-rounds=3 seconds=0.1", app="leased")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    granted = {event["lease"]: event for event in events_of(done, "lease_granted")}
    calls = [call for call in done.calls if call["task"] == "train"]
    assert len(calls) == 24 and len(granted) < 24, "workers are used again"
    [whole] = {lease_bytes(granted, call) for call in calls if call["client"] == "0"}
    assert {lease_bytes(granted, call) for call in calls if call["client"] in ("1", "5")} == {6 * GIB}
    rest = {lease_bytes(granted, call) for call in calls if call["client"] not in ("0", "1", "5")}
    assert rest == {whole // 4}
    assert {granted[call["lease"]]["cores"] for call in calls if call["client"] in ("1", "5")} == {1}
    assert host.status().holders == ()


def lease_bytes(granted: dict[str, Any], call: dict[str, Any]) -> int:
    [gpu] = granted[call["lease"]]["gpus"]
    return int(gpu["memory_bytes"])
