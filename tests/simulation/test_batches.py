"""Runs of an app that handles several messages together: results match single messages within rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulations import Simulation, run

# A worker then tries batches of four in the second round.
COUNT = 24

pytestmark = pytest.mark.timeout(300)


def done(tmp_path: Path, name: str, *options: str, **config: Any) -> tuple[Simulation, dict[Any, Any]]:
    """Run the app. Return the simulation, and the facts that each client recorded in each round."""
    folder = tmp_path / name
    folder.mkdir()
    pairs = {"folder": str(folder), **config}
    written = " ".join(f"{key}={json.dumps(value)}" for key, value in pairs.items())
    options = ("--max-workers", "1", "--seed", "1", *options)
    simulation = run("batched", COUNT, tmp_path / f"{name}-runs", "--run-config", written, *options)
    lines = [json.loads(line) for line in (folder / "facts").read_text().splitlines()]
    facts = {(line["round"], line["client"]): line for line in lines}
    assert len(facts) == len(lines), "a client was handled twice"
    return simulation, facts


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_the_results_match_those_of_single_messages(network: str, tmp_path: Path) -> None:
    together, facts = done(tmp_path, "together", network=network)
    single, expected = done(
        tmp_path, "single", "--deterministic", "--calls-per-worker", "100", network=network
    )
    assert together.status == single.status == 0, together.output + single.output
    assert {line["together"] for line in expected.values()} == {1}, "deterministic runs have no batches"
    assert {line["together"] for line in facts.values()} >= {1, 4}
    assert facts.keys() == expected.keys() and len(facts) == 2 * COUNT
    for key, line in facts.items():
        assert line["weights"] == pytest.approx(expected[key]["weights"], rel=0, abs=1e-6), key
        assert (line["seed"], line["times"]) == (expected[key]["seed"], key[0])
    assert len({line["seed"] for line in facts.values()}) == 2 * COUNT
    for line in together.calls:
        assert line["outcome"] == "ok" and line["cpu_s"] > 0
    larger_batches = [batch for batch in batches(together) if len(batch) > 1]
    assert {len(batch) for batch in larger_batches} >= {4} and together.summary["workers_started"] == 1
    messages = sum(map(len, larger_batches))
    summary = together.summary["batches"]
    assert (summary["count"], summary["messages"]) == (len(larger_batches), messages)
    assert f"{messages} messages in {len(larger_batches)} batches; the fastest size: " in together.output
    assert sorted(client for batch in batches(together) for client in batch) == sorted([*range(COUNT)] * 2)
    assert "batches " not in single.output


def batches(simulation: Simulation) -> list[set[int]]:
    """Return the clients of each call. The trace has a line for each of them."""
    clients_by_call: dict[str, set[int]] = {}
    for line in simulation.calls:
        clients_by_call.setdefault(line["call"].partition("-")[0], set()).add(int(line["client"]))
    return list(clients_by_call.values())


def test_an_exception_fails_its_batch_and_an_error_reply_one_client(tmp_path: Path) -> None:
    simulation, facts = done(tmp_path, "fails", **{"raise": 3, "refuse": 9})
    assert simulation.status == 0, simulation.output
    failed = {int(line["client"]) for line in simulation.calls if line["outcome"] == "error"}
    # Which clients share a batch depends on the sizes that are tried.
    assert 3 in failed and failed in batches(simulation)
    reasons = simulation.summary["failures"]
    failed_clients = {int(message["client"]) for reason in reasons for message in reason["messages"]}
    assert failed_clients == failed | {9} and simulation.summary["failed"] == len(failed_clients)
    assert "ValueError: of the app" in simulation.output and "no data" in simulation.output
    assert {client for number, client in facts if number == 2} == {*range(COUNT)} - failed
