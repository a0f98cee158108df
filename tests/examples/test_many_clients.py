"""examples/many-clients trains several clients in one step. The test runs the command of its page."""

from __future__ import annotations

import shlex

import pytest
from launched import REPOSITORY, SIMULATE, Launch

APP = REPOSITORY / "examples" / "many-clients"
ROUNDS, CLIENTS = 3, 24

pytestmark = pytest.mark.timeout(300)


def test_it_learns_in_batches(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    (written,) = (
        line for line in (APP / "README.md").read_text().splitlines() if "flower-gpu simulate" in line
    )
    command, _, app, *options = shlex.split(written)
    assert (command, app, options) == ("flower-gpu", "examples/many-clients", ["--clients", "100"])
    smaller = ("--clients", str(CLIENTS), "--rounds", str(ROUNDS), "--seed", "1")
    done = launch(APP, *smaller, command=SIMULATE, timeout_s=200)
    assert done.code == 0, done.output + done.logs()
    assert done.result["failed"] == 0 and done.result["messages"] == ROUNDS * CLIENTS
    assert done.result["batches"]["messages"] > CLIENTS
    losses = [row["loss"] for row in (done.result["initial"], *done.result["rounds"])]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.95 * losses[0]
