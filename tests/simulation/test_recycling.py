"""Workers of a simulation that handle several messages: each message finds the state of a new worker."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import recycling_tasks
from live_processes import is_running
from recycled_handler import Handler, has_failed
from waiting import until

from flower_gpu.errors import NotDeterministicError
from flower_gpu.simulation.host import MANY, CallError, MessageOutcome
from flower_gpu.workers import process_settings, threads
from flower_gpu.workers.call import Call
from flower_gpu.workers.caller import Line

RUN_ID = 11


@pytest.fixture(scope="module")
def with_torch() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def run(line: Line, task: str, *args: Any, method: str = "forkserver", count: int = 1) -> Any:
    call = Call(f"recycling_tasks:{task}", args, env={"OMP_NUM_THREADS": str(count)}, setup=threads.SETUP)
    return line.run(call, method, calls=100)


def test_settings_that_a_client_changes_are_reset_for_the_next(with_torch: Line) -> None:
    import torch

    names = [*recycling_tasks.OF_TORCH, *recycling_tasks.OF_PYTHON]
    if hasattr(torch.backends, "fp32_precision"):
        names += recycling_tasks.OF_NEW_TORCH
    first = run(with_torch, "look_at", names)
    # Setting a value that is already set can count as a change, and then later settings differ.
    assert run(with_torch, "look_at", names) == first
    for name in names:
        _, original, changed = run(with_torch, "look_and_change", name)
        assert changed != original == first[name], name
        # A worker is new here if the setting cannot be reset.
        assert run(with_torch, "look_at", names) == first, name
    with_torch.retire()


def test_a_setting_that_cannot_be_reset_ends_the_worker(with_torch: Line) -> None:
    """A privileged process can reset some of these settings, and then its worker stays."""
    names = [*recycling_tasks.LASTING]
    first = run(with_torch, "look_at", names)
    for name in names:
        pid, original, changed = run(with_torch, "look_and_change", name)
        assert changed != original == first[name], name
        assert run(with_torch, "look_at", names) == first, name
        stays = run(with_torch, "look_and_change", "folder")[0] == pid
        assert stays if name == "soft limit" else not stays or name != "no_new_privs", name
    with_torch.retire()


def test_each_client_gets_its_own_number_of_threads(with_torch: Line) -> None:
    counts_by_call = [run(with_torch, "thread_counts", count=count) for count in (1, 2, 2, 1)]
    assert [counts for _, *counts in counts_by_call] == [["1", 1], ["2", 2], ["2", 2], ["1", 1]]
    assert len({pid for pid, *_ in counts_by_call}) == 1


def test_random_numbers_are_those_of_the_seed(with_torch: Line) -> None:
    with_torch.retire()
    pid, first = run(with_torch, "numbers", 1)
    assert len(set(first)) == 4
    same_pid, other = run(with_torch, "numbers", 2)
    assert same_pid == pid
    assert not set(first) & set(other)
    assert run(with_torch, "numbers", 1) == (pid, first)
    with_torch.retire()
    new_pid, again = run(with_torch, "numbers", 1)
    assert new_pid != pid
    assert again == first


def test_torch_imported_by_a_client_is_reset() -> None:
    """The first client's function imports torch, and the second client sees none of its settings."""
    with contextlib.closing(Line()) as line:
        for _ in range(2):
            assert run(line, "import_torch_late", method="spawn")[1] == "torch.float32"


# Messages


def test_messages_share_a_worker_but_not_their_state(new_handler: Callable[..., Handler]) -> None:
    handler = new_handler(3)
    facts = [handler(number % 4) for number in range(7)]
    # The module keeps its state.
    assert [entry["calls"] for entry in facts] == [1, 2, 3, 1, 2, 3, 1]
    # Each node has its own state.
    assert [entry["times"] for entry in facts] == [1, 1, 1, 1, 2, 2, 2]
    assert handler.handler.facts()["workers_started"] == len({entry["pid"] for entry in facts}) == 3
    handler.pool.end_parked()
    assert handler(0)["calls"] == 1


def test_random_numbers_do_not_depend_on_earlier_messages_of_the_worker(
    new_handler: Callable[..., Handler],
) -> None:
    nodes = [0, 1, 2, 0, 3]
    fresh, reused = new_handler(1), new_handler(100)
    first = [fresh(node)["drawn"] for node in nodes]
    assert [reused(node)["drawn"] for node in nodes] == first
    # Node 0's second message also draws other numbers.
    assert len(set(first)) == 5
    assert new_handler(1, seed=4)(0)["drawn"] != first[0]


def test_a_failed_message_leaves_the_state_unchanged(new_handler: Callable[..., Handler]) -> None:
    handler = new_handler(5)
    handler(0)
    learned = list(handler.learned)
    assert handler.error(0, "fail").startswith("train of client 0: ValueError: of the app")
    assert "exited with code 3" in handler.error(0, "die")
    assert handler.learned == learned
    assert handler.times(0) == 1
    assert handler(0)["times"] == 2


def test_failed_messages_release_their_room_in_main_memory(
    new_handler: Callable[..., Handler], tmp_path: Path
) -> None:
    handler = new_handler(5)
    assert "of the app" in handler.error(0, "fail")
    assert "exited with code 3" in handler.error(0, "die")
    # A second try after main memory ran out begins only if no other message is in flight.
    assert handler(1, "killed once", file=str(tmp_path / "killed"))["times"] == 1


@pytest.mark.parametrize(
    ("method", "is_strict"), [("forkserver", False), ("forkserver", True), ("spawn", False)]
)
def test_a_message_is_cancelled_while_it_runs(
    method: str,
    is_strict: bool,
    new_handler: Callable[..., Handler],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLOWER_GPU_START_METHOD", method)
    handler = new_handler(5, is_strict=is_strict)
    if method == "forkserver":
        handler(0)
    visit = handler.visit(1, "hang", file=str(tmp_path / "begun"))
    thread = threading.Thread(
        target=lambda: until((tmp_path / "begun").exists) and handler.handler.cancel(visit.message_id)
    )
    thread.start()
    assert has_failed(handler.handled(visit))
    thread.join()
    assert handler.times(1) == 0
    assert handler(1)["times"] == 1


@pytest.mark.parametrize("task", ["hang", "killed once"])
@pytest.mark.parametrize("used", [False, True])
def test_a_message_is_cancelled_before_its_worker_starts(
    task: str, used: bool, new_handler: Callable[..., Handler], tmp_path: Path
) -> None:
    """A cancelled message is not handled, and neither it nor its retry keeps later messages waiting."""
    handler = new_handler(5)
    if used:
        handler(0)
    # The next message has to wait for the host's memory.
    with handler.in_flight():
        # This does not depend on the machine's memory: the first try or the retry waits, depending on the
        # task.
        handler.pool.memory._available = lambda: (0 if task == "hang" else 1 << 40, 1 << 40)
        visit = handler.visit(1, task, file=str(tmp_path / "begun"))
        answers: list[MessageOutcome] = []
        thread = threading.Thread(target=lambda: answers.append(handler.handled(visit)), daemon=True)
        thread.start()
        until(lambda: handler.pool.memory_waits == 1)
        handler.handler.cancel(visit.message_id)
        thread.join(60)
        assert not thread.is_alive(), "it still waits for memory"
    assert has_failed(answers[0])
    assert (tmp_path / "begun").exists() == (task == "killed once")
    assert handler.times(1) == 0
    assert handler(1)["times"] == 1


def test_the_end_of_a_run_ends_all_waits_for_memory(
    new_handler: Callable[..., Handler], tmp_path: Path
) -> None:
    handler = new_handler(5)
    with handler.in_flight():
        visit = handler.visit(1, "killed once", file=str(tmp_path / "begun"))
        answers: list[MessageOutcome] = []
        thread = threading.Thread(target=lambda: answers.append(handler.handled(visit)), daemon=True)
        thread.start()
        until(lambda: handler.pool.memory_waits == 1)
        handler.handler.cancel_all()
        thread.join(60)
        assert not thread.is_alive()
    assert has_failed(answers[0])


def test_idle_workers_end_before_a_retry_with_all_memory(
    new_handler: Callable[..., Handler], tmp_path: Path
) -> None:
    handler = new_handler(5)
    # Each thread keeps its worker.
    with ThreadPoolExecutor(2) as threads:
        met = threading.Barrier(2)
        idle = [facts["pid"] for facts in threads.map(lambda node: met.wait() + 1 and handler(node), [0, 1])]
        assert all(map(is_running, idle))
        facts = handler(2, "killed once", file=str(tmp_path / "killed"))
        assert facts["times"] == 1
        assert not any(map(is_running, idle))
        again = list(threads.map(lambda node: met.wait() + 1 and handler(node)["times"], [0, 1]))
    assert again == [2, 2]


def test_a_message_without_memory_is_not_retried_if_on_oom_is_fail(
    new_handler: Callable[..., Handler], tmp_path: Path
) -> None:
    handler = new_handler(options={"on_oom": "fail"})
    answer = handler.handled(handler.visit(1, "killed once", file=str(tmp_path / "killed")))
    assert has_failed(answer) and handler.handler.facts()["workers_started"] == 1


def test_a_message_cancelled_before_it_arrives_is_not_handled(new_handler: Callable[..., Handler]) -> None:
    """Ray may deliver a later call first."""
    handler = new_handler()
    visit = handler.visit(1)
    handler.handler.cancel(visit.message_id)
    assert has_failed(handler.handled(visit)) and handler.handler.facts()["workers_started"] == 0


def test_an_exit_of_the_app_does_not_end_the_thread(
    new_handler: Callable[..., Handler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An app that runs in this process may call ``sys.exit``."""
    handler = new_handler()

    def exits(*args: object, **options: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr("flower_gpu.flower.message_call.call_many", exits)
    assert handler.error(0, "answer") == "3"


def test_reused_workers_handle_each_message_once(new_handler: Callable[..., Handler], tmp_path: Path) -> None:
    handler = new_handler()
    log = tmp_path / "handled"
    assert not handler.handler.facts()["recycling"]["is_used_again"]
    facts = [handler(number % 4, "append", file=str(log)) for number in range(12)]
    assert log.read_text().split() == [str(number % 4) for number in range(12)]
    assert len({entry["pid"] for entry in facts}) == 1
    assert [handler.times(node) for node in range(4)] == [3] * 4
    assert handler.handler.facts()["recycling"] == {"calls_per_worker": MANY, "is_used_again": True}
    # The first call may import modules. Then its duration is not learned.
    assert handler.learned[-11:] == [number % 4 for number in range(1, 12)]


def test_a_deterministic_run_retries_a_message_whose_worker_died(
    new_handler: Callable[..., Handler], tmp_path: Path
) -> None:
    expected = new_handler(1)(0)
    handler = new_handler(1, is_strict=True)
    facts = handler(0, "die once", file=str(tmp_path / "died"))
    assert facts["drawn"] == expected["drawn"] and facts["times"] == 1
    assert handler.handler.facts()["workers_started"] == 2
    reply = handler.handled(handler.visit(1, "die")).reply
    assert reply is not None and isinstance(error := reply.error, CallError)
    assert isinstance(error.ends_run, NotDeterministicError)
    assert re.search(r"(?s)exited with code 3.*model would differ", str(error.ends_run))
    assert handler.handler.facts()["workers_started"] == 5
    assert "of the app" in handler.error(2, "fail")
    assert handler.handler.facts()["workers_started"] == 6


def test_a_framework_that_a_client_imports_is_seeded_and_deterministic(
    new_handler: Callable[..., Handler],
) -> None:
    """So a worker that is forked with the framework later has the same numbers."""
    torch = pytest.importorskip("torch")
    facts = new_handler(1, is_strict=True)(0, "late torch")
    assert facts["is_deterministic"] and facts["seed"] != torch.Generator().initial_seed()


def test_the_docs_page_names_all_settings() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs/explanation/simulation.md").read_text().split())
    names = [*process_settings.SETTINGS, *process_settings.LASTING]
    words = [word for name in names for word in re.split(r", | and the other hooks", name) if word]
    assert [word for word in words if word not in page] == []
