"""Messages whose handlers call a vectorized function: one worker handles several together."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from simulations import Simulation, run

COUNT = 8

pytestmark = pytest.mark.timeout(300)


def done(tmp_path: Path, name: str, *options: str, **config: Any) -> tuple[Simulation, dict[Any, Any]]:
    """Run the app; return what each client has written down in each round."""
    folder = tmp_path / name
    folder.mkdir()
    pairs = {"folder": str(folder), **config}
    written = " ".join(f"{key}={json.dumps(value)}" for key, value in pairs.items())
    found = run("batched", COUNT, tmp_path / f"{name}-runs", "--run-config", written, *options)
    lines = (folder / "facts").read_text().splitlines() if (folder / "facts").exists() else []
    facts = {(line["round"], line["client"]): line for line in map(json.loads, lines)}
    assert len(facts) == len(lines), "a client was handled twice"
    return found, facts


def test_each_client_finds_and_gives_what_it_would_alone(tmp_path: Path) -> None:
    together, facts = done(tmp_path, "together", "--max-workers", "1", "--seed", "1")
    assert together.status == 0, together.output
    single, expected = done(
        tmp_path, "single", "--max-workers", "1", "--seed", "1", "--calls-per-worker", "1"
    )
    assert single.status == 0, single.output
    assert set(facts) == set(expected) and len(facts) == 2 * COUNT - 2
    for key, line in facts.items():
        assert line["found"] == pytest.approx(expected[key]["found"], abs=1e-6)
        assert line["facts"] == expected[key]["facts"], key
        assert line["times"] == expected[key]["times"] == key[0]
    # Two clients have failed, each alone; the trace has a line for each.
    for one in (together, single):
        failed = [(call["client"], call["error"]) for call in one.calls if call["outcome"] != "ok"]
        assert [client for client, _ in sorted(failed)] == ["3", "4"], failed
        assert "ValueError: before the step" in one.output
        assert len(one.calls) == 2 * COUNT
    batches = Counter(call["call"].partition("-")[0] for call in together.calls if call["round"] == 2)
    assert list(batches.values()) == [COUNT]
    assert len({call["pid"] for call in together.calls}) == 1
    assert together.summary["workers_started"] == 1
    assert re.search(r"client \d and 7 others, round 2: client 5 is done", together.output)


def test_deterministic_runs_handle_messages_one_by_one(tmp_path: Path) -> None:
    found, facts = done(tmp_path, "runs", "--deterministic", "--seed", "1", **{"num-server-rounds": 1})
    assert found.status == 0, found.output
    assert len(facts) == COUNT
    assert not any("-" in call["call"] for call in found.calls)


def test_a_function_that_cannot_be_vectorized_is_named(tmp_path: Path) -> None:
    found, facts = done(tmp_path, "dropout", layer="dropout")
    assert found.status == 1
    assert not facts
    assert "cannot run for several clients at once, because of Dropout: it draws" in found.output
