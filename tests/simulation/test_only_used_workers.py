"""The hint to use ``--calls-per-worker 1`` if messages fail only in reused workers."""

from __future__ import annotations

import pytest

from flower_gpu import trace
from flower_gpu.simulation.reporting import lines_of
from flower_gpu.watch.history import History
from flower_gpu.watch.result import result_of

HINT = (
    "  all 4 were in workers that had handled other messages before, and the first messages of 5 workers "
    "went well: --calls-per-worker 1 gives each message a worker of its own"
)


def hints(*calls: tuple[int, bool, str], client: str = "3") -> list[str]:
    """Return the hints in the summary of a run.

    ``calls``: tuples with the number of calls, whether they ran in reused workers, and their outcome.
    """
    history = History()
    history.feed([trace.make("run_started", kind="simulate", name="app", clients=9)])
    for number, (count, is_used, outcome) in enumerate(calls):
        for call in range(count):
            extra = {"used_again": True} if is_used else {}
            fields = {"call": f"{number}.{call}", "client": client, "task": "train", "round": 1, "pid": call}
            for event in ("worker_started", "worker_finished"):
                history.feed([trace.make(event, **fields, **extra, outcome=outcome)])
    history.feed([trace.make("run_finished", outcome="completed", messages=99, failed=4)])
    return [line for line in lines_of(result_of(history), None) if "--calls-per-worker" in line]


def test_failures_of_reused_workers_lead_to_a_hint() -> None:
    assert hints((5, False, "ok"), (4, True, "error"), (90, True, "ok")) == [HINT]


@pytest.mark.parametrize(
    "calls",
    [
        [(5, False, "ok"), (1, False, "error"), (4, True, "error")],
        # This may be chance.
        [(5, False, "ok"), (1, True, "error"), (90, True, "ok")],
        [(1, False, "ok"), (4, True, "error")],
        [(5, False, "ok"), (4, True, "cancelled")],
        [(5, False, "ok"), (90, True, "ok")],
        [],
    ],
)
def test_no_hint_is_given_without_reason(calls: list[tuple[int, bool, str]]) -> None:
    assert hints(*calls) == []


def test_calls_of_the_server_do_not_count() -> None:
    """The server evaluates in new workers."""
    assert hints((5, False, "ok"), (4, True, "error"), client="server") == []
