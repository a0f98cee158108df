"""Sets of pending messages without hosts and threads: which outcomes count, and which sums are fetched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from flwr.app import Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from flower_gpu.errors import WorkerDiedError
from flower_gpu.simulation.host import (
    AssignedMessage,
    GroupSum,
    Host,
    HostInfo,
    HostReport,
    MessageOutcome,
    SumGroup,
    failed,
)
from flower_gpu.simulation.pending_messages import Job, NodeBlocks, PendingMessages

BLOCK = 2


class SilentHost(Host):
    """A host that never answers by itself."""

    def __init__(self, name: str) -> None:
        super().__init__(HostInfo(name, 1, 1, {}, 1, []))

    def submit(self, assigned_messages: Sequence[AssignedMessage]) -> None: ...

    def exchange(self, assigned_messages: Sequence[AssignedMessage]) -> HostReport:
        return HostReport()

    def ask_for_sum(self, group: int) -> None: ...

    def forget(self, group: int) -> None: ...

    def cancel(self, message_id: str) -> None: ...


class SafeSilentHost(SilentHost):
    """The same, for a host that cannot be lost."""

    can_be_lost = False


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give this process the identity that Flower's messages need."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    yield


def blocks_of(count: int) -> PendingMessages:
    """Return a set of messages to nodes 10, 11, ... in blocks of two nodes."""
    numbers = itertools.count(1)
    pending = PendingMessages(
        NodeBlocks(lambda message: (message.metadata.dst_node_id - 10) // BLOCK, lambda: 100),
        new_group=lambda: SumGroup(next(numbers), "num-examples", True),
    )
    for number in range(count):
        message = Message(RecordDict(), 10 + number, "train")
        message.metadata.__dict__["_message_id"] = f"message-{number}"
        pending.push(message)
    return pending


def started(pending: PendingMessages, host: Host) -> list[Job]:
    """Give all queued messages to a host."""
    return list(iter(lambda: pending.next_job(host), None))  # type: ignore[arg-type]


def replied(job: Job) -> MessageOutcome:
    content = RecordDict({"metrics": MetricRecord({"num-examples": 1})})
    return MessageOutcome(job.message_id, Message(content, reply_to=job.message))


def crashed(job: Job) -> MessageOutcome:
    return MessageOutcome(job.message_id, failed(job.message, WorkerDiedError("killed")))


def fetched(pending: PendingMessages) -> list[int]:
    """Return the numbers of the groups whose sums are fetched now."""
    return [partial_sum.group.number for partial_sum in pending.sums_to_fetch(is_due=False)]


def record_sum(pending: PendingMessages, jobs: Sequence[Job]) -> list[MessageOutcome]:
    """Record the sum of these jobs, and return the outcomes that count now."""
    assert jobs[0].partial_sum is not None
    part = GroupSum(jobs[0].partial_sum.group, ids=[job.message_id for job in jobs])
    return [outcome for _, outcome in pending.record_sum(part)]


def test_sums_are_passed_on_in_the_order_of_the_blocks() -> None:
    pending = blocks_of(4)
    jobs = started(pending, SafeSilentHost("here"))
    for job in jobs[2:]:
        assert pending.record_outcome(job, replied(job)) and not fetched(pending)
    for job in jobs[:2]:
        pending.record_outcome(job, replied(job))
        pending.put_reply(job.message, Message(RecordDict(), reply_to=job.message))
    assert fetched(pending) == [1, 2] and not fetched(pending), "each sum is fetched once"
    record_sum(pending, jobs[2:])
    pending.collect()
    assert not pending.can_collect, "the first block has no sum yet"
    record_sum(pending, jobs[:2])
    assert len(pending.collect()) == 2 and not pending.groups


def test_a_block_in_which_every_client_failed_has_no_sum() -> None:
    pending = blocks_of(2)
    for job in started(pending, SafeSilentHost("here")):
        (outcome,) = pending.record_outcome(job, crashed(job))
        assert outcome.reply is not None
        pending.put_reply(job.message, outcome.reply)
    assert not fetched(pending)
    assert len(pending.collect()) == 2 and pending.is_done


def test_a_reply_after_the_deadline_reopens_no_block() -> None:
    """The first block has no reply at the deadline. Its message is done while another sum is fetched."""
    pending = blocks_of(4)
    first, _, *others = started(pending, SafeSilentHost("here"))
    for job in others:
        pending.record_outcome(job, replied(job))
    pending.stop()
    assert fetched(pending) == [2]
    assert not pending.record_outcome(first, replied(first))
    assert not fetched(pending) and not pending.is_done
    record_sum(pending, others)
    assert len(pending.collect()) == 1 and pending.is_done


@pytest.mark.parametrize("is_lost", [False, True])
def test_outcomes_of_a_host_that_can_be_lost_count_with_their_sum(is_lost: bool) -> None:
    pending, host = blocks_of(2), SilentHost("there")
    jobs = started(pending, host)
    outcomes = [replied(job) for job in jobs]
    for job, outcome in zip(jobs, outcomes, strict=True):
        assert not pending.record_outcome(job, outcome)
    if is_lost:
        pending.lost(host)
        assert not record_sum(pending, jobs), "a late sum of a lost host is ignored"
        again = started(pending, SilentHost("another"))
        assert sorted(job.message_id for job in again) == [job.message_id for job in jobs]
        assert {job.partial_sum.group.number for job in again if job.partial_sum} == {2}
    else:
        assert fetched(pending) == [1]
        assert record_sum(pending, jobs) == outcomes


def test_an_outcome_that_counts_when_it_is_pulled_is_returned_once() -> None:
    pending = PendingMessages(counts_when_pulled=True)
    message = Message(RecordDict(), 10, "train")
    message.metadata.__dict__["_message_id"] = "message"
    pending.push(message)
    (job,) = started(pending, SilentHost("there"))
    outcome = replied(job)
    assert not pending.record_outcome(job, outcome)
    assert pending.has_reply("message") and pending.pull("message") is None
    assert pending.outcome_to_count("message") == (job, outcome)
    assert pending.outcome_to_count("message") is None
