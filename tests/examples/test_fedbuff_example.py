"""examples/fedbuff simulates slow clients. The test runs the first command of its page."""

from __future__ import annotations

import math
import shlex

import pytest
from how_to_pages import first_command
from launched import REPOSITORY, SIMULATE, Launch

UPDATES, ROUNDS = 8, 2


# On a busy machine the slow clients become slower by the same factor.
@pytest.mark.timeout(900)
def test_it_learns_while_slow_clients_train(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    command, _, app, *options = shlex.split(first_command("asynchronous.md"))
    assert (command, app) == ("flower-gpu", "examples/fedbuff")
    done = launch(REPOSITORY / app, *options, "--rounds", str(ROUNDS), command=SIMULATE, timeout_s=800)
    assert done.code == 0, done.output + done.logs()
    assert done.result["failed"] == 0 and done.result["messages"] == ROUNDS * UPDATES
    loss = done.result["rounds"][-1]["metrics"]["server-evaluate"]["loss"]
    assert loss < math.log(10), "the loss of guessing one of ten digits"
    assert done.result["settings"]["clients_table"]["7-23/8"] == {"slow-down": 8}
