"""The grid of a run on several hosts: each host takes messages as it has room for them."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable
from typing import Any, Final, cast

from flwr.app import Message
from flwr.supercore.run import Run

from flower_gpu.errors import NotDeterministicError, RunEndedError, WorkerDiedError
from flower_gpu.flower.averaging import BLOCK_NODES, SummedElsewhere, SummedReplies
from flower_gpu.flower.rounds import RoundState
from flower_gpu.simulation.boxes import Box
from flower_gpu.simulation.checkpoint import Checkpoints
from flower_gpu.simulation.cluster.hosts import Host, HostLostError, Hosts, Listener
from flower_gpu.simulation.cluster.sum_boxes import BlockBox, Held, SumBox
from flower_gpu.simulation.cluster.visits import Learned, SentModels, Visited
from flower_gpu.simulation.durations import Durations
from flower_gpu.simulation.grid import SHORT_S, LocalGrid, late_text, reply_of
from flower_gpu.simulation.messages import Seeds
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.states import StateStore

# On so many hosts that were lost a message may have been under way: then it is what ends them.
_MOST_LOST: Final = 3
_NO_HOST_S: Final = 60.0  # without any host: then the run ends
_TAKE_S: Final = 10.0  # between two times that a host's sums are fetched: what is lost with it is younger
_TAKE_SHARE: Final = 0.05  # of the time may be spent on that
_FAR: Final = 1.5  # so many times as fast is worth waiting for half a call
_PACE_CALLS: Final = 16  # over which a host's pace is a mean
# Short messages are sent to a host before it is their turn: else workers would wait while a reply and the
# next message are on their way.
_AHEAD: Final = 2
_MOST_COMING: Final = 4  # sums that are on their way to the driver at a time


class ClusterGrid(LocalGrid):
    """Hands messages to hosts, each of which has as many under way as it says that it can have.

    Parameters
    ----------
    run, nodes, checkpoints, resumed, durations, sums_in_order, is_strict
        As for :class:`flower_gpu.simulation.grid.LocalGrid`.
    hosts : Hosts
        Who handles messages.
    states : StateStore
        What clients keep.
    seed : int
        The run's.
    put : callable
        Puts an object where all hosts can fetch it.
    """

    sums_elsewhere = True

    def __init__(
        self,
        run: Run,
        nodes: VirtualNodes,
        hosts: Hosts,
        states: StateStore,
        seed: int,
        put: Any,
        checkpoints: Checkpoints | None = None,
        resumed: RoundState | None = None,
        *,
        durations: Durations | None = None,
        learned: Durations | None = None,
        sums_in_order: bool = False,
        is_strict: bool = False,
    ) -> None:
        super().__init__(
            run,
            nodes,
            _Canceller(self),
            0,
            checkpoints,
            resumed,
            durations=durations,
            sums_in_order=sums_in_order,
            is_strict=is_strict,
        )
        self._hosts = hosts
        self._states = states
        self._seeds = Seeds(seed)
        self._seed_of: dict[str, int] = {}  # of messages that are not done
        self._models = SentModels(put)
        self._learned = Durations() if learned is None else learned
        self._group_numbers = itertools.count(1)
        self._where: dict[str, Host] = {}  # what runs, by message
        self._losses: Counter[str] = Counter()  # of messages that were under way on hosts that were lost
        self._sum_boxes: set[SumBox] = set()

    def listener(self) -> Listener:
        """Return what the hosts are to call."""
        return Listener(self._joined, self._lost, self._has_room)

    def summed(
        self, messages: Iterable[Message], timeout: float | None, *, in_order: bool
    ) -> SummedElsewhere:
        """Return what sends messages and brings the sums of their replies."""
        return _Sums(self, messages, timeout, in_order)

    def cancel(self, message: Message) -> None:
        """Give up a message that is under way."""
        with self._changed:
            host = self._where.get(message.metadata.message_id)
        if host is not None and not host.is_gone:
            host.cancel(message.metadata.message_id)

    # Hosts

    def _joined(self, host: Host) -> None:
        with self._changed:
            self._most_unread += 2 * (host.about.concurrency + _AHEAD)
            count = host.about.concurrency
            threads = [
                threading.Thread(
                    target=self._serve,
                    args=(host, number >= count),
                    name=f"flower-gpu-{host.name}-{number}",
                    daemon=True,
                )
                for number in range(count + _AHEAD)
            ]
            # Those of hosts that are gone have ended, or will soon.
            self._threads = [thread for thread in self._threads if thread.is_alive()] + threads
            for thread in threads:
                thread.start()

    def _lost(self, host: Host) -> None:
        with self._changed:
            for box in self._sum_boxes:
                box.lost(host)
                self._wait_for_host(box)
            self._changed.notify_all()
        if not self._hosts.there:
            timer = threading.Timer(_NO_HOST_S, self._end_without_hosts)
            timer.daemon = True
            timer.start()

    def _has_room(self) -> None:
        with self._changed:
            self._changed.notify_all()

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

    def _serve(self, host: Host, is_ahead: bool) -> None:
        """Have a host handle one message after the other; ``is_ahead``: it may wait there for its turn."""
        while not self._is_closed and not host.is_gone:
            with self._changed:
                while (job := self._job(host, is_ahead)) is None and not self._is_closed and not host.is_gone:
                    self._changed.wait()
            if job is not None:
                self._done_by(host, *job)
            del job

    def _job(self, host: Host, is_ahead: bool) -> tuple[Message, Box, Held | None] | None:
        if host.is_full or host.is_gone or (is_ahead and host.call_s > SHORT_S):
            return None
        for box in self._waiting:
            if not box.has_room() or (is_ahead and box.count_waiting <= self._hosts.concurrency):
                continue
            held: Held | None = None
            if box.has_any_order and self._is_for_others(host, box):
                continue
            if isinstance(box, SumBox):
                found = box.begin_on(host)
                if found is None:
                    continue
                message, held = found
            else:
                message = box.begin()
            if not box.has_waiting:
                self._waiting.remove(box)
            self._where[message.metadata.message_id] = host
            return message, box, held
        return None

    def _is_for_others(self, host: Host, box: Box) -> bool:
        """Tell whether the last messages of a round are done earlier by hosts that are far faster."""
        faster = [other for other in self._hosts.there if not other.is_full and _FAR * other.pace < host.pace]
        return box.count_waiting <= sum(other.about.concurrency for other in faster)

    def _done_by(self, host: Host, message: Message, box: Box, held: Held | None) -> None:
        message_id = message.metadata.message_id
        visited, error = None, None
        began = time.monotonic()
        try:
            visited = self._visited(host, message, held)
        except HostLostError as lost:
            with self._changed:
                self._where.pop(message_id, None)
                self._again(message, box)
            self._hosts.lost(host, lost)
            return
        except Exception as raised:
            error = reply_of(_raises(raised), message)
        if visited is not None and visited.learned is not None:
            self._learn(host, visited.learned, box.expected_s.get(message_id, 0.0))
        seconds = time.monotonic() - began
        with self._changed:
            host.call_s = seconds if math.isinf(host.call_s) else (3 * host.call_s + seconds) / 4
            self._where.pop(message_id, None)
            if visited is None:  # no host has handled it
                box.end(message, error)
            elif held is None:
                self._end(host, message, box, visited)
            else:
                assert isinstance(box, SumBox)
                box.hold(message, held)
                self._wait_for_host(box)  # where this one was lost meanwhile
                if isinstance(box, BlockBox) and box.is_complete(message):
                    host.settle(held.group.number)

    def _visited(self, host: Host, message: Message, held: Held | None) -> Visited:
        """Have a host handle a message.

        Raises
        ------
        HostLostError
            If it is lost.
        Exception
            What is an error in the place of the reply.
        """
        message_id, node_id = message.metadata.message_id, message.metadata.dst_node_id
        self.check_node(message)
        partition = self._nodes.partition_of(node_id)
        if self._losses[message_id] >= _MOST_LOST:
            raise WorkerDiedError(
                f"{_MOST_LOST} hosts were lost while they handled a message to client {partition}"
            )
        with self._changed:
            if message_id not in self._seed_of:
                self._seed_of[message_id] = self._seeds(message)
            seed = self._seed_of[message_id]
        state = self._states.read(partition)
        group = None if held is None else held.group
        return host.handle(self._models.visit(message, seed, state, group))

    def _end(self, host: Host, message: Message, box: Box, visited: Visited) -> None:
        """Put the reply to a message into its box, and keep what the client keeps."""
        reply = visited.reply
        assert reply is not None
        host.messages += 1
        host.failed += reply.has_error()
        self._forget(message.metadata.message_id)
        if box.is_wanted(message) and not reply.has_error():
            self._put_state(self._nodes.partition_of(message.metadata.dst_node_id), visited.state)
        box.end(message, reply)

    def _again(self, message: Message, box: Box) -> None:
        """Have another host handle a message."""
        self._losses[message.metadata.message_id] += 1
        box.again(message)
        self._wait_for_host(box)
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

    def _learn(self, host: Host, learned: Learned, expected_s: float) -> None:
        if expected_s > 0 and learned.is_usual:
            host.pace += (learned.seconds / expected_s - host.pace) / _PACE_CALLS
        self._learned.learn(
            learned.kind,
            learned.client,
            learned.seconds,
            f"{learned.device} on {host.name}",
            learned.examples,
            is_usual=learned.is_usual,
        )

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

        Returns
        -------
        tuple
            Groups with sums to take, errors in the place of replies, and whether nothing comes after these.
        """
        with self._changed:
            while True:
                now = time.monotonic()
                failed, box.failed = box.failed, []
                is_late = now >= deadline
                groups = box.to_take(is_due=now >= due, is_last=is_late)
                is_over = is_late or (not groups and box.is_done)
                if groups or failed or is_over:
                    return groups, failed, is_over
                until = min(deadline, due if due > now else math.inf)
                self._changed.wait(None if math.isinf(until) else until - now)

    def _taken(self, box: SumBox, groups: Iterable[Held]) -> _PartSums:
        """Fetch the sums of groups, and yield them."""
        waiting, coming = deque(groups), deque[tuple[Held, Any]]()
        while waiting or coming:
            while waiting and len(coming) < _MOST_COMING:
                held = waiting.popleft()
                coming.append((held, cast(Host, held.host).taking(held.group.number)))
            held, one = coming.popleft()
            host = cast(Host, held.host)
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
            yield host.name, part.summed
            del part


_PartSums = Generator[tuple[str, SummedReplies], None, None]


def _of_failed(errors: list[Message]) -> SummedReplies:
    """Return replies of which none has anything to sum."""
    summed = SummedReplies("")
    summed.rest = errors
    return summed


class _Canceller:
    """What the grid's own threads would call; here hosts have threads, and only messages are given up."""

    def __init__(self, grid: ClusterGrid) -> None:
        self._grid = grid

    def __call__(self, message: Message) -> Message:
        raise NotImplementedError

    def idle(self) -> None:
        """Nothing."""

    def leave(self) -> None:
        """Nothing."""

    def cancel(self, message: Message) -> None:
        """Give up a message."""
        self._grid.cancel(message)


class _Sums(SummedElsewhere):
    """The sums of one round's replies."""

    def __init__(
        self, grid: ClusterGrid, messages: Iterable[Message], timeout: float | None, in_order: bool
    ) -> None:
        self._grid = grid
        self._messages = messages
        self._timeout = timeout
        self._in_order = in_order

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


def _raises(error: Exception) -> Any:
    def handle(message: Message) -> Message:
        raise error

    return handle
