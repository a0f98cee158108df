"""What single clients of a simulation have of their own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from simulations import run

from flower_gpu.errors import ConfigError
from flower_gpu.simulation.clients import Clients

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
    found = [clients.of_client(partition) for partition in range(COUNT)]
    assert {id(own) for own in found} == {id(own) for own in clients.different()}


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
    ],
)
def test_what_cannot_be_used_is_said(entries: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Clients.of(entries, COUNT)


@pytest.mark.timeout(200)
def test_a_slow_client_takes_longer_and_its_time_limit_counts_that(tmp_path: Path) -> None:
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
