"""Which host has which message: each host gets messages as it has room for them.

A thread gives hosts the first messages of a round. One for each host exchanges: it brings the next messages,
and fetches what has become of others. A message that a host gives back, or that was on a host that is lost,
waits in its box again, and whatever host has room gets it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Final

from flwr.app import Message

from flower_gpu.errors import RunEndedError, WorkerDiedError
from flower_gpu.flower.records import NUMBERED, round_of
from flower_gpu.flower.resuming.states import StateStore
from flower_gpu.simulation.boxes import Box, Job, SumBox
from flower_gpu.simulation.host import Answer, Answers, Host, NoSuchNodeError, Visit, failed
from flower_gpu.simulation.in_worker import seed_of
from flower_gpu.simulation.nodes import VirtualNodes

# On so many hosts that were lost a message may have been: then it is what ends them. So that those which were
# there with it are not taken for that, the last host has it alone.
_MOST_LOST: Final = 3
_NO_HOST_S: Final = 60.0  # without any host: then the run ends
_END_S: Final = 5.0  # that a thread which asks a host may go on at the end


class Durations:
    """Estimates the duration of calls from earlier ones.

    The longest message of a round goes out first. Then a round takes at most a third longer than in the best
    order (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969, https://doi.org/10.1137/0117039),
    and with many messages for each worker hardly longer at all. Methods may be called by several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, dict[int, float]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is known."""
        return not self._seconds

    def learn(self, kind: str, client: int, seconds: float) -> None:
        """Take note of a call that has succeeded.

        ``kind``: the message's type.
        ``client``: the partition.
        ``seconds``: from the start of its worker, or from when it was sent to one that was there, to its
        result. The wait for a lease is no part of that.
        """
        with self._lock:
            known = self._seconds.setdefault(kind, {})
            # The last calls count most: a client's data may grow.
            known[client] = (known.get(client, seconds) + seconds) / 2

    def expected_s(self, calls: Sequence[tuple[str, int]]) -> list[float]:
        """Return the seconds that each call is expected to take, of which kind and client are given.

        A client of which nothing is known is expected to take the mean of all clients. In sizes with a long
        tail most are below it: so that client goes out early, after those known to be long.
        Where nothing is known of a kind, its calls are expected to take 0 seconds.
        """
        with self._lock:
            known = {kind: self._seconds.get(kind, {}) for kind in {kind for kind, _ in calls}}
            means = {kind: fmean(seconds.values()) if seconds else 0.0 for kind, seconds in known.items()}
            return [known[kind].get(client, means[kind]) for kind, client in calls]


class Seeds:
    """Seeds of a run's messages: independent of earlier messages, so a resumed run has the same.

    ``seed``: the run's.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._sent: Counter[str] = Counter()  # of the newest round
        self._round = 0

    def __call__(self, message: Message) -> int:
        """Return a message's seed; another one where its client was sent the same kind in the same round."""
        number = round_of(message)
        group = message.metadata.group_id
        if group.startswith(NUMBERED):
            return seed_of(f"{self._seed} {message.metadata.dst_node_id} {group}")
        with self._lock:
            if number is not None and number > self._round:
                self._round = number
                self._sent.clear()
            place = f"{self._seed} {message.metadata.dst_node_id} {message.metadata.message_type} {number}"
            seed = seed_of(f"{place} {self._sent[place]}")
            self._sent[place] += 1
        return seed


class Dispatcher:
    """Hands messages to hosts: as many to each as it can handle at a time, more while they are short.

    ``nodes``, ``states``: who is sent messages, and what they keep.
    ``seed``: the run's.
    ``durations``: learns what calls take.
    ``changed``: the lock of all boxes, and who is told when something has happened to one.
    ``hosts``: those that are there.
    """

    def __init__(self, nodes: VirtualNodes, states: StateStore, seed: int, durations: Durations) -> None:
        self.nodes = nodes
        self.changed = threading.Condition()
        self.hosts: list[Host] = []
        self._states = states
        self._durations = durations
        self._seeds = Seeds(seed)
        self._seed_of: dict[str, int] = {}  # of messages that are not done
        self._losses: Counter[str] = Counter()  # of messages that hosts had that were lost
        self._waiting: list[Box] = []  # with messages that no host has, in the order of their sending
        self._summing: set[SumBox] = set()
        self._jobs: dict[str, Job] = {}  # that hosts have, by message
        self._with_room: set[Host] = set()
        self._is_closed = False
        self._giver = threading.Thread(target=self._give_all, name="flower-gpu-giver", daemon=True)
        self._giver.start()
        self._exchanging: list[threading.Thread] = []

    @property
    def concurrency(self) -> int:
        """How many messages all hosts handle at a time, at most."""
        return sum(host.about.concurrency for host in self.hosts)

    def most_unread(self, kind: str) -> int:
        """Return the maximum number of replies that are expected or unread. More would fill the memory.

        With batches it is larger: while the replies of one batch are read, the next one has to be complete.
        """
        single = 2 * (self.concurrency + len(self.hosts))
        return max(single, 2 * sum(host.messages_in_batches(kind) for host in self.hosts))

    def stuck_since(self) -> float | None:
        """Return since when messages wait and none has a worker; None where that is not so, or not known."""
        since = [host.stuck_since() for host in self.hosts]
        found = [one for one in since if one is not None]
        return max(found) if found and len(found) == len(since) else None

    # Boxes. Whoever calls these has the lock.

    def add(self, box: Box) -> None:
        """Hand out the messages that wait in a box."""
        if box not in self._waiting:
            self._waiting.append(box)
        if isinstance(box, SumBox):
            self._summing.add(box)
        self.changed.notify_all()

    def remove(self, box: Box) -> None:
        """Hand out no more messages of a box, which is closed."""
        if isinstance(box, SumBox):
            self._summing.discard(box)
        self.changed.notify_all()

    # Hosts

    def joined(self, host: Host) -> None:
        """Give a host messages from now on."""
        with self.changed:
            self.hosts.append(host)
            self._with_room.add(host)
            self.changed.notify_all()
        thread = threading.Thread(
            target=self._exchange_all, args=(host,), name=f"flower-gpu-{host.name}", daemon=True
        )
        self._exchanging = [*(each for each in self._exchanging if each.is_alive()), thread]
        thread.start()

    def lost(self, host: Host, error: Exception) -> None:
        """Have others handle what a host had; the second time nothing happens."""
        with self.changed:
            if host.is_gone or self._is_closed:
                return
            host.is_gone = True
            self.hosts.remove(host)
            self._with_room.discard(host)
            for job in [job for job in self._jobs.values() if job.host is host]:
                self._take_from_host(job)
                self._losses[job.message_id] += 1
                self._again(job)
            for box in self._summing:
                box.lost(host)
                self._waits(box)
            left = len(self.hosts)
            self.changed.notify_all()
        host.lost(error, left)
        if not host.can_be_lost:
            self._end_without_hosts(f"this machine cannot handle messages any more: {error}")
        elif not left:
            text = f"no host of the cluster is left, for {_NO_HOST_S:.0f} s"
            timer = threading.Timer(_NO_HOST_S, self._end_without_hosts, [text])
            timer.daemon = True
            timer.start()

    def _end_without_hosts(self, text: str) -> None:
        """End the run if still no host is there."""
        with self.changed:
            if self.hosts:
                return
            for box in self._waiting:
                for message in box.take_waiting():
                    box.end(message, failed(message, RunEndedError(text)))
            self.changed.notify_all()

    def close(self) -> None:
        """Hand out no more messages."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self._giver.join()

    def wait(self) -> None:
        """Wait until no host is asked any more: after this was closed, and then the hosts."""
        for thread in self._exchanging:
            thread.join(_END_S)

    # Messages

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Give up messages that hosts have."""
        for job in jobs:
            if self._jobs.get(job.message_id) is job and not job.host.is_gone:
                job.host.cancel(job.message_id)

    def _give_all(self) -> None:
        """Give hosts messages as these are sent, or have to be handled again."""
        while True:
            with self.changed:
                while not (jobs := self._next_jobs(self._with_room)) and not self._is_closed:
                    self.changed.wait()
            if self._is_closed:
                break
            for host, its_jobs in jobs.items():
                try:
                    host.take(self._visits(its_jobs))
                except Exception as error:
                    self.lost(host, error)
            del jobs, its_jobs

    def _exchange_all(self, host: Host) -> None:
        """Fetch a host's answers, and give it the next messages, until it is lost."""
        jobs: list[Job] = []
        try:
            while not self._is_closed and not host.is_gone:
                jobs = self._take_answers(host, host.exchange(self._visits(jobs)))
        except Exception as error:
            self.lost(host, error)

    def _next_jobs(self, hosts: Iterable[Host]) -> dict[Host, list[Job]]:
        """Return the next messages for hosts: first for all workers, then those that wait there."""
        jobs: dict[Host, list[Job]] = {}
        self._waiting = [box for box in self._waiting if box.count_waiting]
        if not self._waiting:
            return jobs
        concurrency = self.concurrency
        with_room = [host for host in hosts if not (host.is_full or host.is_gone)]
        for is_ahead in (False, True):
            turns = deque(with_room)
            while turns:
                host = turns.popleft()
                job = self._next_job(host, concurrency, is_ahead=is_ahead)
                if job is not None:
                    jobs.setdefault(host, []).append(job)
                    turns.append(host)
        for host in with_room:
            if host.under_way >= max(host.most(box.kind) for box in self._waiting):
                self._with_room.discard(host)
        return jobs

    def _next_job(self, host: Host, concurrency: int, *, is_ahead: bool) -> Job | None:
        for box in self._waiting:
            most = host.about.concurrency
            if is_ahead:  # and leaves the others their part
                part = most + box.count_waiting * most // (2 * max(concurrency, 1))
                most = host.most(box.kind) if len(self.hosts) == 1 else min(host.most(box.kind), part)
            if host.is_exclusive or host.under_way >= most:
                continue
            job = box.begin(host)
            if job is None:
                continue
            if self._losses[job.message_id] == _MOST_LOST - 1:
                if host.under_way:
                    box.again(job, is_last=True)
                    continue
                host.is_exclusive = True
            self._jobs[job.message_id] = job
            host.under_way += 1
            return job
        return None

    def _visits(self, jobs: Iterable[Job]) -> list[Visit]:
        """Return what is to be sent. What cannot be is an error in the place of the reply."""
        visits = []
        for job in jobs:
            try:
                if self._is_to_be_sent(job):
                    visits.append(self._visit(job))
            except Exception as error:
                with self.changed:
                    if self._take_from_host(job):
                        self._end(job, failed(job.message, error))
                    self.changed.notify_all()
        return visits

    def _is_to_be_sent(self, job: Job) -> bool:
        with self.changed:
            if job.box.wants(job.message_id):
                return self._jobs.get(job.message_id) is job
            if self._take_from_host(job):
                self._again(job)
            return False

    def _visit(self, job: Job) -> Visit:
        node_id = job.message.metadata.dst_node_id
        if node_id not in self.nodes:
            raise NoSuchNodeError(f"there is no node {node_id}")
        partition = self.nodes.partition_of(node_id)
        if self._losses[job.message_id] >= _MOST_LOST:
            raise WorkerDiedError(
                f"{_MOST_LOST} hosts were lost while they handled a message to client {partition}"
            )
        with self.changed:
            if job.message_id not in self._seed_of:
                self._seed_of[job.message_id] = self._seeds(job.message)
            seed = self._seed_of[job.message_id]
        return job.visit(seed, self._states.read(partition))

    def _take_answers(self, host: Host, told: Answers) -> list[Job]:
        """Take answers to messages; returns the host's next messages."""
        if not told.answers and not told.sums and host.is_full == told.is_full:
            return []
        done: list[tuple[Job, Answer]] = []
        with self.changed:
            host.is_full = told.is_full
            for answer in told.answers:
                job = self._jobs.get(answer.message_id)
                if job is not None and self._take_from_host(job, host):
                    done.append((job, answer))
                    self._take_answer(job, answer)
            for part in told.sums:
                for box in self._summing:
                    for job, answer in box.summed(part):
                        self.count(job, answer)
            jobs = self._next_jobs([host]).get(host, [])
            self.changed.notify_all()
        for job, answer in done:
            if answer.call_s is not None:
                metadata = job.message.metadata
                partition = self.nodes.partition_of(metadata.dst_node_id)
                self._durations.learn(metadata.message_type, partition, answer.call_s)
        return jobs

    def _take_answer(self, job: Job, answer: Answer) -> None:
        if answer.reply is None:
            self._again(job)
            return
        if not answer.reply.has_error():
            job.host.learn(job.box.kind, answer.seconds)
        for one in job.box.answered(job, answer):
            self.count(job, one)
        if not job.box.wants(job.message_id):
            self._forget(job.message_id)

    def count(self, job: Job, answer: Answer) -> None:
        """Accept an answer: keep the client's state, and put the reply into its box."""
        reply = answer.reply
        assert reply is not None
        try:
            partition = self.nodes.partition_of(job.message.metadata.dst_node_id)
            if answer.state or (answer.state is not None and self._states.size_bytes(partition)):
                self._states.put(partition, answer.state)
        except Exception as error:  # as of a full disk
            if isinstance(job.box, SumBox):  # its reply may be in a sum already
                job.box.error = error
            reply = failed(job.message, error)
        job.host.messages += 1
        job.host.failed += reply.has_error()
        self._end(job, reply)

    def _end(self, job: Job, reply: Message) -> None:
        self._forget(job.message_id)
        job.box.running.pop(job.message_id, None)
        job.box.end(job.message, reply)

    def _again(self, job: Job) -> None:
        """Have a message handled by whatever host has room, if its reply is wanted."""
        job.box.again(job)
        if not job.box.wants(job.message_id):
            self._forget(job.message_id)
        self._waits(job.box)

    def _waits(self, box: Box) -> None:
        if box.count_waiting and box not in self._waiting:
            self._waiting.append(box)

    def _take_from_host(self, job: Job, host: Host | None = None) -> bool:
        """Take note that a host does not have a message any more; tells whether it had it until now."""
        if self._jobs.get(job.message_id) is not job or (host is not None and job.host is not host):
            return False
        del self._jobs[job.message_id]
        job.host.under_way -= 1
        job.host.is_exclusive = False
        if not job.host.is_gone:
            self._with_room.add(job.host)
        return True

    def _forget(self, message_id: str) -> None:
        self._seed_of.pop(message_id, None)
        self._losses.pop(message_id, None)
