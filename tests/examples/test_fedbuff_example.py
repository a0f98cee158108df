"""examples/fedbuff: slow clients in a simulation, by the first command of its page."""

from __future__ import annotations

import math
import shlex

import pytest
from how_to_pages import first_command
from launched import REPOSITORY, SIMULATE, Launch

UPDATES, ROUNDS = 8, 2


@pytest.mark.timeout(900)  # on a busy machine each client is as many times as slow
def test_it_learns_while_slow_clients_train(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    command, _, app, *options = shlex.split(first_command("asynchronous.md"))
    assert (command, app) == ("flower-gpu", "examples/fedbuff")
    done = launch(REPOSITORY / app, *options, "--rounds", str(ROUNDS), command=SIMULATE, timeout_s=800)
    assert done.code == 0, done.output + done.logs()
    assert done.result["failed"] == 0 and done.result["messages"] == ROUNDS * UPDATES
    loss = done.result["rounds"][-1]["metrics"]["server-evaluate"]["loss"]
    assert loss < math.log(10), "less than by guessing one of ten digits"
    assert done.result["settings"]["clients_table"]["7-23/8"] == {"slow-down": 8}
