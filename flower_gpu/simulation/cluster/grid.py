"""The grid of a run on several hosts: each host takes messages as it has room for them."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.supercore.run import Run

from flower_gpu.errors import NotDeterministicError, RunEndedError, WorkerDiedError
from flower_gpu.flower.averaging import BLOCK_NODES, SummedElsewhere, SummedReplies
from flower_gpu.simulation.boxes import Box
from flower_gpu.simulation.cluster.hosts import HostLostError, Hosts, Listener, RemoteHost
from flower_gpu.simulation.cluster.sum_boxes import BlockBox, Held, SumBox
from flower_gpu.simulation.cluster.visits import SentModels, Visit, Visited
from flower_gpu.simulation.durations import Durations
from flower_gpu.simulation.grid import (
    SHORT_S,
    WAIT_S,
    SimulationGrid,
    expired,
    expired_error,
    late_text,
    reply_of,
)
from flower_gpu.simulation.messages import Seeds
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.states import StateStore

# On so many hosts that were lost a message may have been: then it is what ends them. So that those which were
# there with it are not taken for that, the last host has it alone.
_MOST_LOST: Final = 3
_NO_HOST_S: Final = 60.0  # without any host: then the run ends
_END_S: Final = 5.0  # that a thread which asks a host may go on at the end
_TAKE_S: Final = 10.0  # between two times that a host's sums are fetched: what is lost with it is younger
_TAKE_SHARE: Final = 0.05  # of the time may be spent on that
_FAR: Final = 1.5  # so many times as fast is worth waiting for half a call
_PACE_CALLS: Final = 16  # over which a host's pace is a mean
# Of short messages a host has so much waiting: else its workers would wait while replies and the next
# messages are on their way. They are handed over several at a time, which costs less.
_AHEAD_S: Final = 0.5
_LEAST_S: Final = 1e-3  # that a message is taken for
_MOST_COMING: Final = 4  # sums that are on their way to the driver at a time


@dataclass(frozen=True)
class _Job:
    """A message that a host has."""

    host: RemoteHost
    message: Message
    box: Box
    held: Held | None  # what its reply goes to, if that is summed there


class ClusterGrid(SimulationGrid):
    """Hands messages to hosts: as many to each as it can handle at a time, more while they are short.

    A thread gives hosts the first messages of a round. One for each host fetches what is finished there and
    gives it the next ones.

    ``run``, ``nodes``, ``options``: as for :class:`flower_gpu.simulation.grid.SimulationGrid`.
    ``hosts``: who handles messages.
    ``states``: what clients keep.
    ``seed``: the run's.
    ``put``: puts an object where all hosts can fetch it.
    ``learned``: where is kept what messages take.
    """

    sums_elsewhere = True

    def __init__(
        self,
        run: Run,
        nodes: VirtualNodes,
        hosts: Hosts,
        states: StateStore,
        seed: int,
        put: Callable[[Any], Any],
        *,
        learned: Durations | None = None,
        **options: Any,
    ) -> None:
        super().__init__(run, nodes, **options)
        self._hosts = hosts
        self._states = states
        self._seeds = Seeds(seed)
        self._seed_of: dict[str, int] = {}  # of messages that are not done
        self._models = SentModels(put)
        self._learned = Durations() if learned is None else learned
        self._group_numbers = itertools.count(1)
        self._jobs: dict[str, _Job] = {}  # that hosts have, by message
        self._under_way: Counter[RemoteHost] = Counter()  # how many of them each host has
        self._with_room: set[RemoteHost] = set()
        self._losses: Counter[str] = Counter()  # of messages that hosts had that were lost
        self._alone: set[RemoteHost] = (
            set()
        )  # hosts that have one message, and get no other until it is finished
        self._sum_boxes: set[SumBox] = set()
        self._exchanging: list[threading.Thread] = []
        self._start_threads([threading.Thread(target=self._give_all, name="flower-gpu-giver", daemon=True)])

    def listener(self) -> Listener:
        """Return what the hosts are to call."""
        return Listener(self._joined, self._lost, self._set_full)

    def summed(
        self, messages: Iterable[Message], timeout: float | None, *, in_order: bool
    ) -> SummedElsewhere:
        """Return what sends messages and brings the sums of their replies."""
        return _RoundSums(self, messages, timeout, in_order=in_order)

    def cancel(self, message: Message) -> None:
        """Give up a message that a host has."""
        with self._changed:
            job = self._jobs.get(message.metadata.message_id)
        if job is not None and not job.host.is_gone:
            job.host.cancel(message.metadata.message_id)

    def wait(self) -> None:
        """Wait until no host is asked any more: after this was closed, and then the hosts."""
        for thread in self._exchanging:
            thread.join(_END_S)

    # Hosts

    def _joined(self, host: RemoteHost) -> None:
        with self._changed:
            self._most_unread += 2 * (host.about.concurrency + 1)
            self._with_room.add(host)
            self._changed.notify_all()
        thread = threading.Thread(
            target=self._exchange_all, args=(host,), name=f"flower-gpu-{host.name}", daemon=True
        )
        self._exchanging = [*(each for each in self._exchanging if each.is_alive()), thread]
        thread.start()

    def _lost(self, host: RemoteHost) -> None:
        with self._changed:
            for box in self._sum_boxes:
                box.lost(host)
                self._wait_for_host(box)
            self._changed.notify_all()
        if not self._hosts.there:
            timer = threading.Timer(_NO_HOST_S, self._end_without_hosts)
            timer.daemon = True
            timer.start()

    def _set_full(self, host: RemoteHost, is_full: bool) -> None:
        with self._changed:
            if host.is_full and not is_full:
                self._changed.notify_all()
            host.is_full = is_full

    def _end_without_hosts(self) -> None:
        """End the run if still no host is there."""
        error = RunEndedError(f"no host of the Ray cluster is left, for {_NO_HOST_S:.0f} s")
        with self._changed:
            if self._hosts.there:
                return
            boxes, self._waiting = self._waiting, []
            for box in boxes:
                for message in box.begin_all():
                    box.end(message, reply_of(_raises(error), message))

    # Messages

    def _give_all(self) -> None:
        """Give hosts messages as these are sent, or have to be handled again."""
        while True:
            with self._changed:
                while not (jobs := self._next_jobs(self._with_room)) and not self._is_closed:
                    self._changed.wait()
            if self._is_closed:
                break
            for host, its_jobs in jobs.items():
                try:
                    host.give(self._visits(its_jobs))
                except Exception as error:
                    self._hosts.lost(host, error)
            del jobs, its_jobs

    def _exchange_all(self, host: RemoteHost) -> None:
        """Fetch what a host has finished, and give it the next messages, until it is lost."""
        jobs: list[_Job] = []
        try:
            while not self._is_closed and not host.is_gone:
                jobs = self._finished(host, host.exchange(self._visits(jobs)))
        except Exception as error:
            self._hosts.lost(host, error)
        with self._changed:
            for job in [job for job in self._jobs.values() if job.host is host]:
                self._take_from_host(job)
                self._losses[job.message.metadata.message_id] += 1
                self._again(job)
            self._with_room.discard(host)

    def _finished(self, host: RemoteHost, finished: Sequence[Visited]) -> list[_Job]:
        """Take what has become of messages; returns what the host is to have next."""
        if not finished:
            return []
        with self._changed:
            jobs = [self._jobs[visited.message_id] for visited in finished]
            for job, visited in zip(jobs, finished, strict=True):
                self._take_from_host(job)
                self._finish(job, visited)
            next_jobs = self._next_jobs([host]).get(host, [])
            self._changed.notify_all()
        for job, visited in zip(jobs, finished, strict=True):
            if visited.call_s is not None:
                self._learn(job, visited.call_s)
        return next_jobs

    def _next_jobs(self, hosts: Iterable[RemoteHost]) -> dict[RemoteHost, list[_Job]]:
        """Return what hosts are to have now: first messages for all workers, then those that wait there."""
        jobs: dict[RemoteHost, list[_Job]] = {}
        if self._waiting:
            concurrency = self._hosts.concurrency
            with_room = [host for host in hosts if not (host.is_full or host.is_gone)]
            for is_ahead in (False, True):
                turns = deque(with_room)
                while self._waiting and turns:
                    host = turns.popleft()
                    job = self._next_job(host, concurrency, is_ahead=is_ahead)
                    if job is not None:
                        jobs.setdefault(host, []).append(job)
                        turns.append(host)
            kinds = {box.kind for box in self._waiting}
            for host in with_room:
                most = max((_most(host, kind) for kind in kinds), default=host.about.concurrency)
                if self._under_way[host] >= most:
                    self._with_room.discard(host)
        return jobs

    def _next_job(self, host: RemoteHost, concurrency: int, *, is_ahead: bool) -> _Job | None:
        for box in self._waiting:
            most = host.about.concurrency
            if is_ahead:  # and leaves the others their part
                most = min(
                    _most(host, box.kind), most + box.count_waiting * most // (2 * max(concurrency, 1))
                )
            if host in self._alone or self._under_way[host] >= most or not box.has_room():
                continue
            if box.has_any_order and self._is_for_others(host, box, concurrency):
                continue
            held: Held | None = None
            if isinstance(box, SumBox):
                found = box.begin_on(host)
                if found is None:
                    continue
                message, held = found
            else:
                message = box.begin()
            if self._losses[message.metadata.message_id] == _MOST_LOST - 1:
                if self._under_way[host]:
                    box.again(message, is_last=True)
                    continue
                self._alone.add(host)
            if not box.has_waiting:
                self._waiting.remove(box)
            job = self._jobs[message.metadata.message_id] = _Job(host, message, box, held)
            self._under_way[host] += 1
            return job
        return None

    def _is_for_others(self, host: RemoteHost, box: Box, concurrency: int) -> bool:
        """Tell whether the last messages of a round are done earlier by hosts that are far faster."""
        if box.count_waiting > concurrency:
            return False
        faster = [other for other in self._hosts.there if not other.is_full and _FAR * other.pace < host.pace]
        return box.count_waiting <= sum(other.about.concurrency for other in faster)

    def _visits(self, jobs: Iterable[_Job]) -> list[Visit]:
        """Return what is to be sent. What cannot be is an error in the place of the reply."""
        visits = []
        for job in jobs:
            try:
                if self._is_wanted(job):
                    visits.append(self._visit(job))
            except Exception as error:
                with self._changed:
                    if self._take_from_host(job):
                        self._fail(job, error)
        return visits

    def _is_wanted(self, job: _Job) -> bool:
        """Tell whether a message is still to be sent to its host."""
        with self._changed:
            if job.box.is_wanted(job.message):
                return self._jobs.get(job.message.metadata.message_id) is job
            if self._take_from_host(job):
                self._forget(job.message.metadata.message_id)
            return False

    def _visit(self, job: _Job) -> Visit:
        message, message_id = job.message, job.message.metadata.message_id
        self.check_node(message)
        partition = self._nodes.partition_of(message.metadata.dst_node_id)
        if self._losses[message_id] >= _MOST_LOST:
            raise WorkerDiedError(
                f"{_MOST_LOST} hosts were lost while they handled a message to client {partition}"
            )
        with self._changed:
            if message_id not in self._seed_of:
                self._seed_of[message_id] = self._seeds(message)
            seed = self._seed_of[message_id]
        group = None if job.held is None else job.held.group
        return self._models.visit(message, seed, self._states.read(partition), group)

    def _finish(self, job: _Job, visited: Visited) -> None:
        """Take what has become of a message that a host had."""
        host, box = job.host, job.box
        if not visited.is_handled:
            if box.is_wanted(job.message):
                host.is_full = True  # until it says something else
            self._again(job)
            return
        if visited.call_s is not None:
            mean_s = host.call_s.get(box.kind, visited.seconds)
            host.call_s[box.kind] = (3 * mean_s + visited.seconds) / 4
        if job.held is None:
            try:
                self._end(job, visited)
            except Exception as error:  # as of a full disk, of what the client keeps
                self._fail(job, error)
            return
        assert isinstance(box, SumBox)
        box.hold(job.message, job.held)
        self._wait_for_host(box)  # where this one was lost meanwhile
        if isinstance(box, BlockBox) and box.is_complete(job.message):
            host.settle(job.held.group.number)

    def _take_from_host(self, job: _Job) -> bool:
        """Take note that a host does not have a message any more; tells whether it had it until now."""
        if self._jobs.get(job.message.metadata.message_id) is not job:
            return False
        del self._jobs[job.message.metadata.message_id]
        self._under_way[job.host] -= 1
        self._alone.discard(job.host)
        if not job.host.is_gone:
            self._with_room.add(job.host)
        return True

    def _end(self, job: _Job, visited: Visited) -> None:
        """Put the reply to a message into its box, and keep what the client keeps."""
        reply, message, host = visited.reply, job.message, job.host
        assert reply is not None
        if job.box.is_wanted(message) and not reply.has_error():
            self._put_state(self._nodes.partition_of(message.metadata.dst_node_id), visited.state)
        host.messages += 1
        host.failed += reply.has_error()
        self._forget(visited.message_id)
        job.box.end(message, reply)

    def _fail(self, job: _Job, error: Exception) -> None:
        """Put an error in the place of a reply."""
        self._forget(job.message.metadata.message_id)
        job.box.end(job.message, reply_of(_raises(error), job.message))

    def _again(self, job: _Job) -> None:
        """Have a message handled, by whatever host has room, if its reply is wanted."""
        if not job.box.is_wanted(job.message):
            self._forget(job.message.metadata.message_id)
            return
        if job.message.metadata.message_id in job.box.expired:
            self._forget(job.message.metadata.message_id)
            job.box.end(job.message, expired(job.message))
            return
        job.box.again(job.message)
        self._wait_for_host(job.box)
        self._changed.notify_all()

    def _wait_for_host(self, box: Box) -> None:
        if box.has_waiting and box not in self._waiting:
            self._waiting.append(box)

    def _forget(self, message_id: str) -> None:
        self._seed_of.pop(message_id, None)
        self._losses.pop(message_id, None)

    def _put_state(self, partition: int, state: bytes) -> None:
        if state or self._states.size_bytes(partition):
            self._states.put_bytes(partition, state)

    def _learn(self, job: _Job, seconds: float) -> None:
        metadata, host = job.message.metadata, job.host
        expected_s = job.box.expected_s.get(metadata.message_id, 0.0)
        if expected_s > 0:
            host.pace += (seconds / expected_s - host.pace) / _PACE_CALLS
        # As on a host of mean pace: some hosts are faster than others.
        partition = self._nodes.partition_of(metadata.dst_node_id)
        self._learned.learn(metadata.message_type, partition, seconds / host.pace)

    # Sums

    def sums(self, box: SumBox, messages: Iterable[Message], timeout: float | None) -> _PartSums:
        """Send messages whose replies hosts sum, and yield these sums, each with the name of its host."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        sent = set()
        with self._changed:
            self._sum_boxes.add(box)
        try:
            for message_id in self._send(messages, box):
                sent.add(message_id)
            due, is_over = time.monotonic() + _TAKE_S, False
            while not is_over:
                self._expire(box)
                groups, failed, is_over = self._wait_for_sums(box, deadline, due)
                if failed:
                    box.finished += len(failed)
                    yield "the cluster", _of_failed(failed)
                began = time.monotonic()
                yield from self._taken(box, groups)
                now = time.monotonic()
                if is_over and self._is_strict and (late := len(sent) - box.finished):
                    raise NotDeterministicError(late_text(late, timeout))
                due = now + max(_TAKE_S, (now - began) / _TAKE_SHARE)
        finally:
            for message_id in sent:
                self._boxes.pop(message_id, None)
                self._forget(message_id)
            with self._changed:
                self._sum_boxes.discard(box)
                groups = box.groups
            self._give_up(box)
            for held in groups:
                host: Any = held.host
                if not host.is_gone:
                    host.forget([held.group.number])

    def _wait_for_sums(
        self, box: SumBox, deadline: float, due: float
    ) -> tuple[list[Held], list[Message], bool]:
        """Wait until something can be taken.

        Returns groups with sums to take, errors in the place of replies, and whether nothing comes after
        these.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                failed, box.failed = box.failed, []
                is_late = now >= deadline
                groups = box.to_take(is_due=now >= due, is_last=is_late)
                is_over = is_late or (not groups and box.is_done)
                if groups or failed or is_over or box.expires_s <= now:
                    return groups, failed, is_over
                until = min(deadline, box.expires_s, due if due > now else math.inf)
                self._changed.wait(min(until - now, WAIT_S))

    def _taken(self, box: SumBox, groups: Iterable[Held]) -> _PartSums:
        """Fetch the sums of groups, and yield them."""
        waiting, coming = deque(groups), deque[tuple[Held, Any]]()
        while waiting or coming:
            while waiting and len(coming) < _MOST_COMING:
                held = waiting.popleft()
                coming.append((held, cast(RemoteHost, held.host).taking(held.group.number)))
            held, one = coming.popleft()
            host = cast(RemoteHost, held.host)
            try:
                part = host.taken(one)
            except HostLostError as error:
                self._hosts.lost(host, error)
                continue
            with self._changed:
                if part is None or not box.is_current(held):
                    continue
                box.done(held, part.ids)
                self._changed.notify_all()  # another block may begin
            for node_id, state in part.states.items():
                self._put_state(self._nodes.partition_of(node_id), state)
            host.messages += len(part.ids)
            host.failed += len(part.ids) - len(part.states)
            if part.error is not None:
                raise part.error
            for reply in part.summed.rest:
                is_expired = reply.metadata.reply_to_message_id in box.expired
                if is_expired and reply.has_error() and reply.error.code == ErrorCode.CLIENT_APP_CRASHED:
                    reply.error = expired_error()  # its worker was ended for that
            yield host.name, part.summed
            del part


_PartSums = Generator[tuple[str, SummedReplies], None, None]


def _of_failed(errors: list[Message]) -> SummedReplies:
    """Return replies of which none has anything to sum."""
    summed = SummedReplies("")
    summed.rest = errors
    return summed


class _RoundSums(SummedElsewhere):
    """The sums of one round's replies."""

    def __init__(
        self, grid: ClusterGrid, messages: Iterable[Message], timeout: float | None, *, in_order: bool
    ) -> None:
        super().__init__(messages, timeout, in_order=in_order)
        self._grid = grid

    def sums(
        self, weighted_by_key: str, *, keeps_integers: bool
    ) -> Generator[tuple[str, SummedReplies], None, None]:
        """Send the messages, and yield sums of replies, each with the name of its host."""
        messages: Iterable[Message] = self._messages
        if self._in_order:
            place_of = self._grid._nodes.place_of
            messages = sorted(messages, key=lambda message: place_of(message.metadata.dst_node_id))
        return self._grid.sums(self._box(weighted_by_key, keeps_integers), messages, self._timeout)

    def _box(self, weighted_by_key: str, keeps_integers: bool) -> SumBox:
        grid = self._grid
        given = (grid._changed, grid._group_numbers, weighted_by_key, keeps_integers)
        if not self._in_order:
            return SumBox(*given)
        return BlockBox(
            *given,
            lambda message: grid.block_of(message.metadata.dst_node_id),
            lambda: 2 * (len(grid._hosts.there) + grid._hosts.concurrency // BLOCK_NODES + 1),
        )


def _most(host: RemoteHost, kind: str) -> int:
    """Return how many messages a host has at most: those that it handles, and short ones that wait there."""
    concurrency, call_s = host.about.concurrency, host.call_s.get(kind, math.inf)
    if call_s > SHORT_S:
        return concurrency
    return concurrency + int(_AHEAD_S / max(call_s, _LEAST_S) * concurrency)


def _raises(error: Exception) -> Any:
    def handle(message: Message) -> Message:
        raise error

    return handle
