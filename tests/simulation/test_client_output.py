"""Which lines of clients are shown, and where all lines are kept."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from simulations import Simulation, run

from flower_gpu.simulation.client_output import ClientOutput
from flower_gpu.simulation.options import LINES_PER_ROUND

pytestmark = pytest.mark.timeout(300)
# Each client prints three lines in a round.
CLIENTS = 9
LINE = re.compile(r"^client \d, round (\d): ", re.MULTILINE)


def lines_by_round(text: str) -> dict[str, int]:
    rounds = LINE.findall(text)
    return {number: rounds.count(number) for number in sorted(set(rounds))}


def run_of_clients(tmp_path: Path, *options: str) -> Simulation:
    done = run("plain", CLIENTS, tmp_path, *options)
    assert done.status == 0, done.output
    assert lines_by_round((done.folder / "clients.log").read_text()) == {"1": 27, "2": 27}
    return done


def test_each_round_shows_its_first_lines_and_a_notice_says_where_all_lines_are(tmp_path: Path) -> None:
    done = run_of_clients(tmp_path)
    assert lines_by_round(done.output) == {"1": LINES_PER_ROUND, "2": LINES_PER_ROUND}
    beginning = f"the first {LINES_PER_ROUND} lines of clients are shown in each round: all are in "
    (notice,) = [line for line in done.output.splitlines() if line.startswith(beginning)]
    assert notice.endswith("/clients.log. --client-output all shows them here")
    hidden = 2 * (27 - LINES_PER_ROUND)
    assert re.search(rf"^client output +{hidden} lines are not shown here: all are in ", done.output, re.M)
    assert done.summary["client_lines_hidden"] == hidden


def test_a_quiet_run_shows_only_the_result(tmp_path: Path) -> None:
    done = run_of_clients(tmp_path, "-q")
    assert done.output.startswith("outcome ") and lines_by_round(done.output) == {}
    assert "54 lines are not shown here: all are in " in done.output


@pytest.mark.parametrize("options", [("-q", "--client-output", "all"), ("--no-progress",)])
def test_all_lines_are_shown_if_asked_for_or_if_no_rounds_are_shown(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = run_of_clients(tmp_path, *options)
    assert lines_by_round(done.output) == {"1": 27, "2": 27}
    assert "not shown" not in done.output


def test_the_stack_of_a_hung_client_is_shown_once(tmp_path: Path) -> None:
    """The worker writes it into its output, from which it gets into the error."""
    table = tmp_path / "clients.toml"
    table.write_text("[1]\ntimeout-s = 8\n")
    options = ("--clients-table", str(table), "--run-config", "hangs-on='1' num-server-rounds=1")
    done = run("plain", 3, tmp_path / "runs", *options)
    assert done.status == 0, done.output
    assert done.output.count("(most recent call first)") == 1, done.output
    for name in ("clients.log", "failures.log"):
        assert (done.folder / name).read_text().count("(most recent call first)") == 1
    (reason,) = done.summary["failures"]
    assert "no result within timeout_s=8" in reason["reason"] and "recent call" not in reason["reason"]


def test_lines_that_threads_write_at_the_same_time_are_counted_once() -> None:
    output = ClientOutput("auto")
    notices: list[int] = []
    output.on_first_hidden = lambda: notices.append(output.hidden)
    admitted: list[int] = []

    def write() -> None:
        for _ in range(100):
            admitted.append(output.admit(3))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(admitted) == LINES_PER_ROUND
    assert output.hidden == 1200 - LINES_PER_ROUND and len(notices) == 1
