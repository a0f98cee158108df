"""The time until new workers train, and the advice if it is long."""

from __future__ import annotations

import pytest

from flower_gpu import frameworks
from flower_gpu.simulation.worker_starts import WorkerStarts

ADVICE = (
    "each message has a new worker, which takes 6.00 s until its first optimizer step, 75 % of its time. "
    "--preload loads data once for all workers"
)


def advice(starts: WorkerStarts, ready_s: dict[bool, float], call_s: float, count: int = 9) -> list[str]:
    return [text for _ in range(count) if (text := starts.learn(ready_s, call_s)) is not None]


def test_long_starts_lead_to_advice_once() -> None:
    starts = WorkerStarts(has_preload=False)
    assert advice(starts, {False: 1.0, True: 6.0}, 8.0) == [ADVICE]
    assert starts.facts() == {"worker_ready_s": 6.0, "worker_ready": "until its first optimizer step"}


@pytest.mark.parametrize(
    ("has_preload", "ready_s", "call_s"),
    [(True, {True: 6.0}, 8.0), (False, {True: 6.0}, 60.0), (False, {True: 0.2}, 0.3), (False, {}, 8.0)],
)
def test_no_advice_is_given_without_reason(
    has_preload: bool, ready_s: dict[bool, float], call_s: float
) -> None:
    """Data is loaded once, training takes longer, starts are short, or workers are reused."""
    starts = WorkerStarts(has_preload=has_preload)
    assert advice(starts, ready_s, call_s) == []
    assert bool(starts.facts()) == bool(ready_s)


def test_evaluation_does_not_hide_the_time_before_training() -> None:
    """Only training messages reach an optimizer step."""
    starts = WorkerStarts(has_preload=False)
    advice(starts, {False: 1.0}, 1.5)
    starts.learn({False: 1.0, True: 6.0}, 8.0)
    assert starts.facts()["worker_ready_s"] == 6.0


def test_the_first_step_of_an_optimizer_is_reported_once() -> None:
    torch = pytest.importorskip("torch")
    reports: list[int] = []
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weights[0]], lr=0.1), torch.optim.Adam([weights[1]])]

    def train() -> None:
        for optimizer, weight in zip(optimizers, weights, strict=True):
            weight.sum().backward()
            optimizer.step()
            optimizer.step()

    train()
    with frameworks.at_first_step(lambda: reports.append(1)):
        assert not reports
        train()
    assert reports == [1]
    train()
    assert reports == [1]
