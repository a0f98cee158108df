"""The dispatcher: assigns messages to hosts, retries the messages of lost hosts, and accepts outcomes.

Messages wait in sets. A host has a capacity, and gets messages while it has room. The dispatcher must keep
every worker busy, but not give one host so many short messages that the others run dry. It must survive the
loss of any host at any moment. And no message may be answered twice, or with two different seeds.

Threads:

- The ServerApp's thread (``grid``) fills sets, calls ``add``, ``remove`` and ``cancel``, and takes replies.
- The giver (``_assign_all``) waits on ``changed``. When messages are added or requeued, it gives them to all
  hosts with room (``Host.submit``). It starts each round.
- Each host has a thread (``_exchange_all``) that calls ``Host.exchange`` in a loop. A call sends the next
  messages and returns the outcomes of earlier ones, so a busy host gets its next messages without a delay.
- A timer (``_end_without_hosts``) ends the run if no host is left for a minute.

One condition, ``changed``, protects the sets and the fields of hosts and of the dispatcher. Calls of a host
may block, so threads release it before they call one. In between, a message may be cancelled or its host may
be lost. So before ``_assigned_messages`` sends a message, it checks that the message is still wanted and on
its host.

``_jobs`` decides which host has a message. ``_take_from_host`` removes an entry, and only one thread gets
True from it. An outcome is ignored if its host no longer has the message. So late outcomes of a lost host do
no harm.

Retries. ``_requeue`` requeues a message when its host returns it without a reply, or when its host is lost.
The next host with room gets it, with the same seed. A lost host may have died because of a message. After the
loss of two hosts, a message gets its last try on a host without other messages (``is_exclusive``). If that
host is lost too, the message is blamed and its call fails. Otherwise, innocent messages on the same three
hosts would be blamed as well.
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
from flower_gpu.simulation.host import (
    AssignedMessage,
    Host,
    HostReport,
    MessageOutcome,
    NoSuchNodeError,
    failed,
)
from flower_gpu.simulation.in_worker import seed_of
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.pending_messages import Job, PendingMessages
from flower_gpu.strategies.resuming.states import StateStore

# A message that was on this many lost hosts is assumed to have caused the losses. The last of these hosts has
# no other message, so that no innocent message is blamed.
_MAX_LOST_HOSTS: Final = 3
# The run ends after this many seconds without any host.
_NO_HOST_S: Final = 60.0
# Seconds that the end of a run waits for each thread that still asks a host.
_END_S: Final = 5.0


class Durations:
    """Estimated durations of calls, learned from earlier calls.

    The longest message of a round is handled first. A round then takes at most a third longer than in the
    best order (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969,
    https://doi.org/10.1137/0117039). With many messages per worker, the difference is negligible.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, dict[int, float]] = {}

    @property
    def is_empty(self) -> bool:
        """True if no call has been recorded."""
        return not self._seconds

    def learn(self, kind: str, client: int, seconds: float) -> None:
        """Record the duration of a successful call.

        ``kind``: the message type.
        ``client``: the client's partition.
        ``seconds``: time from the start of the call's worker, or from sending the call to a running worker,
        to the result. Excludes the wait for a lease.
        """
        with self._lock:
            known = self._seconds.setdefault(kind, {})
            # Recent calls have the largest weight, because a client's data may grow.
            known[client] = (known.get(client, seconds) + seconds) / 2

    def expected_s(self, calls: Sequence[tuple[str, int]]) -> list[float]:
        """Return the expected duration of each call in seconds.

        An unknown client gets the mean of all known clients. When a few clients are very long, most clients
        are below the mean. So an unknown client goes out early, after the clients known to be long.
        Calls of an unknown kind get 0 seconds.

        ``calls``: message type and partition of each call.
        """
        with self._lock:
            known = {kind: self._seconds.get(kind, {}) for kind in {kind for kind, _ in calls}}
            means = {kind: fmean(seconds.values()) if seconds else 0.0 for kind, seconds in known.items()}
            return [known[kind].get(client, means[kind]) for kind, client in calls]


class Seeds:
    """The seeds of a run's messages. They do not depend on earlier rounds, so a resumed run has the same.

    ``seed``: seed of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        # Number of messages of the newest round, by client, type and round
        self._sent: Counter[str] = Counter()
        self._round = 0

    def __call__(self, message: Message) -> int:
        """Return the seed of a message.

        Messages of the same type to the same client in the same round get different seeds.
        """
        number = round_of(message)
        group = message.metadata.group_id
        if group.startswith(NUMBERED):
            return seed_of(f"{self._seed} {message.metadata.dst_node_id} {group}")
        if number is not None and number > self._round:
            self._round = number
            self._sent.clear()
        place = f"{self._seed} {message.metadata.dst_node_id} {message.metadata.message_type} {number}"
        seed = seed_of(f"{place} {self._sent[place]}")
        self._sent[place] += 1
        return seed


class Dispatcher:
    """Assigns messages to hosts. A host with short messages gets more of them than it has workers.

    ``nodes``: the receivers of messages.
    ``states``: store of the clients' states.
    ``seed``: seed of the run.
    ``durations``: gets the duration of each call.
    ``changed``: lock of all sets and condition that is notified of every change to a set.
    ``hosts``: the present hosts.
    """

    def __init__(self, nodes: VirtualNodes, states: StateStore, seed: int, durations: Durations) -> None:
        self.nodes = nodes
        self.changed = threading.Condition()
        self.hosts: list[Host] = []
        self._states = states
        self._durations = durations
        self._seeds = Seeds(seed)
        self._seed_of: dict[str, int] = {}  # seeds of unfinished messages
        self._losses: Counter[str] = Counter()  # number of lost hosts that had the message, by message id
        self._waiting: list[PendingMessages] = []  # sets with queued messages, in the order of sending
        self._summing: set[PendingMessages] = set()  # open sets with sums
        self._jobs: dict[str, Job] = {}  # jobs on hosts, by message id
        self._hosts_with_room: set[Host] = set()
        self._is_closed = False
        self._assigner = threading.Thread(target=self._assign_all, name="flower-gpu-giver", daemon=True)
        self._assigner.start()
        self._exchanging: list[threading.Thread] = []

    @property
    def concurrency(self) -> int:
        """The maximum number of messages that all hosts together handle at a time."""
        return sum(host.info.concurrency for host in self.hosts)

    def max_unread(self, kind: str) -> int:
        """Return the maximum number of replies in flight or unread. More replies could fill the memory.

        The number is larger with batches, because the next batch must be complete while the replies of the
        previous batch are read.
        """
        single = 2 * (self.concurrency + len(self.hosts))
        return max(single, 2 * sum(host.messages_in_batches(kind) for host in self.hosts))

    def stuck_since(self) -> float | None:
        """Return the time since which messages have been waiting with no worker running, or None.

        Returns None unless every host is stuck. The result is the time at which the last host got stuck.
        """
        since = [host.stuck_since() for host in self.hosts]
        known = [time_s for time_s in since if time_s is not None]
        return max(known) if known and len(known) == len(since) else None

    # Sets. Callers of these methods hold the lock.

    def add(self, pending: PendingMessages) -> None:
        """Start to hand out the messages of a set."""
        if pending not in self._waiting:
            self._waiting.append(pending)
        if pending.is_summed:
            self._summing.add(pending)
        self.changed.notify_all()

    def remove(self, pending: PendingMessages) -> None:
        """Stop handing out the messages of a closed set."""
        self._summing.discard(pending)
        self.changed.notify_all()

    # Hosts

    def joined(self, host: Host) -> None:
        """Add a host and start the thread that exchanges messages and outcomes with it."""
        with self.changed:
            self.hosts.append(host)
            self._hosts_with_room.add(host)
            self.changed.notify_all()
        thread = threading.Thread(
            target=self._exchange_all, args=(host,), name=f"flower-gpu-{host.name}", daemon=True
        )
        self._exchanging = [*(running for running in self._exchanging if running.is_alive()), thread]
        thread.start()

    def lost(self, host: Host, error: Exception) -> None:
        """Remove a lost host and requeue its messages. Calling it again has no effect.

        If no host is left, a timer ends the run unless a new host joins. If the host is this machine, the run
        ends at once.

        ``error``: exception that showed the loss.
        """
        with self.changed:
            if host.is_gone or self._is_closed:
                return
            host.is_gone = True
            self.hosts.remove(host)
            self._hosts_with_room.discard(host)
            for job in [job for job in self._jobs.values() if job.host is host]:
                self._take_from_host(job)
                self._losses[job.message_id] += 1
                self._requeue(job)
            for pending in self._summing:
                pending.lost(host)
                self._list_if_waiting(pending)
            remaining = len(self.hosts)
            self.changed.notify_all()
        host.lost(error, remaining)
        if not host.can_be_lost:
            self._end_without_hosts(f"this machine can no longer handle messages: {error}")
        elif not remaining:
            text = f"the cluster has had no host for {_NO_HOST_S:.0f} s"
            timer = threading.Timer(_NO_HOST_S, self._end_without_hosts, [text])
            timer.daemon = True
            timer.start()

    def _end_without_hosts(self, text: str) -> None:
        """End the run if there is still no host: answer all queued messages with a RunEndedError."""
        with self.changed:
            if self.hosts:
                return
            for pending in self._waiting:
                for message in pending.clear_queue():
                    pending.put_reply(message, failed(message, RunEndedError(text)))
            self.changed.notify_all()

    def close(self) -> None:
        """Stop handing out messages, and wait for the giver to end."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        self._assigner.join()

    def wait(self) -> None:
        """Wait until no thread uses a host. Call it after the dispatcher and then the hosts were closed.

        Waits up to 5 s for each thread.
        """
        for thread in self._exchanging:
            thread.join(_END_S)

    # Messages

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancel messages on their hosts. Messages that are no longer there are skipped."""
        for job in jobs:
            if self._jobs.get(job.message_id) is job and not job.host.is_gone:
                job.host.cancel(job.message_id)

    def _assign_all(self) -> None:
        """Give messages to hosts with room when messages are sent or requeued. Body of the giver thread."""
        while True:
            with self.changed:
                while not (jobs := self._next_jobs(self._hosts_with_room)) and not self._is_closed:
                    self.changed.wait()
            if self._is_closed:
                break
            for host, jobs_of_host in jobs.items():
                try:
                    host.submit(self._assigned_messages(jobs_of_host))
                except Exception as error:
                    self.lost(host, error)
            # Otherwise these variables would keep the messages in memory during the next wait.
            del jobs, jobs_of_host

    def _exchange_all(self, host: Host) -> None:
        """Fetch a host's outcomes and give it its next messages, until it is lost. Body of its thread."""
        jobs: list[Job] = []
        try:
            while not self._is_closed and not host.is_gone:
                jobs = self._process_report(host, host.exchange(self._assigned_messages(jobs)))
        except Exception as error:
            self.lost(host, error)

    def _next_jobs(self, hosts: Iterable[Host]) -> dict[Host, list[Job]]:
        """Return the next jobs of each host.

        The first pass gives work to idle workers. The second pass gives hosts messages to keep in their
        queues. In each pass, hosts take turns.
        """
        jobs: dict[Host, list[Job]] = {}
        self._waiting = [pending for pending in self._waiting if pending.queued_count]
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
            if host.in_flight >= max(host.capacity(pending.kind) for pending in self._waiting):
                self._hosts_with_room.discard(host)
        return jobs

    def _next_job(self, host: Host, concurrency: int, *, is_ahead: bool) -> Job | None:
        """Return the next job for a host, or None if it has no room or no set has a message for it.

        ``concurrency``: messages that all hosts handle at a time.
        ``is_ahead``: True if the message may wait in the host's queue, False if a worker must be free.
        """
        for pending in self._waiting:
            max_messages = host.info.concurrency
            if is_ahead:
                # With several hosts, a host queues only half of its share of the waiting messages. The rest
                # stays for the host that is done first.
                part = max_messages + pending.queued_count * max_messages // (2 * max(concurrency, 1))
                capacity = host.capacity(pending.kind)
                max_messages = capacity if len(self.hosts) == 1 else min(capacity, part)
            if host.is_exclusive or host.in_flight >= max_messages:
                continue
            job = pending.next_job(host)
            if job is None:
                continue
            if self._losses[job.message_id] == _MAX_LOST_HOSTS - 1:
                # The last try needs a host without other messages. The message waits for that at the end.
                if host.in_flight:
                    pending.requeue(job, is_last=True)
                    continue
                host.is_exclusive = True
            self._jobs[job.message_id] = job
            host.in_flight += 1
            return job
        return None

    def _assigned_messages(self, jobs: Iterable[Job]) -> list[AssignedMessage]:
        """Return the messages to send for jobs. A job that cannot be sent gets an error as its reply."""
        assigned_messages = []
        for job in jobs:
            try:
                if self._is_to_be_sent(job):
                    assigned_messages.append(self._assigned_message(job))
            except Exception as error:
                with self.changed:
                    if self._take_from_host(job):
                        self._end(job, failed(job.message, error))
                    self.changed.notify_all()
        return assigned_messages

    def _is_to_be_sent(self, job: Job) -> bool:
        """Return True if the job is still wanted and still on its host. An unwanted job is dropped."""
        with self.changed:
            if job.pending.is_pending(job.message_id):
                return self._jobs.get(job.message_id) is job
            if self._take_from_host(job):
                self._requeue(job)
            return False

    def _assigned_message(self, job: Job) -> AssignedMessage:
        node_id = job.message.metadata.dst_node_id
        if node_id not in self.nodes:
            raise NoSuchNodeError(f"there is no node {node_id}")
        partition = self.nodes.partition_of(node_id)
        if self._losses[job.message_id] >= _MAX_LOST_HOSTS:
            raise WorkerDiedError(
                f"{_MAX_LOST_HOSTS} hosts were lost while they handled a message to client {partition}"
            )
        with self.changed:
            if job.message_id not in self._seed_of:
                self._seed_of[job.message_id] = self._seeds(job.message)
            seed = self._seed_of[job.message_id]
        return job.assigned(seed, self._states.read(partition))

    def _process_report(self, host: Host, report: HostReport) -> list[Job]:
        """Process a host's outcomes and sums, and return its next jobs."""
        if not report.outcomes and not report.sums and host.is_full == report.is_full:
            return []
        done: list[tuple[Job, MessageOutcome]] = []
        with self.changed:
            host.is_full = report.is_full
            for outcome in report.outcomes:
                job = self._jobs.get(outcome.message_id)
                if job is not None and self._take_from_host(job, host):
                    done.append((job, outcome))
                    self._process_outcome(job, outcome)
            for part in report.sums:
                for pending in self._summing:
                    for job, outcome in pending.record_sum(part):
                        self.count(job, outcome)
            jobs = self._next_jobs([host]).get(host, [])
            self.changed.notify_all()
        for job, outcome in done:
            if outcome.call_s is not None:
                metadata = job.message.metadata
                partition = self.nodes.partition_of(metadata.dst_node_id)
                self._durations.learn(metadata.message_type, partition, outcome.call_s)
        return jobs

    def _process_outcome(self, job: Job, outcome: MessageOutcome) -> None:
        if outcome.reply is None:
            self._requeue(job)
            return
        if not outcome.reply.has_error():
            job.host.learn(job.pending.kind, outcome.seconds)
        for counted in job.pending.record_outcome(job, outcome):
            self.count(job, counted)
        if not job.pending.is_pending(job.message_id):
            self._forget(job.message_id)

    def count(self, job: Job, outcome: MessageOutcome) -> None:
        """Accept an outcome: store the client's new state and put the reply into its set.

        The caller holds the lock.
        """
        reply = outcome.reply
        assert reply is not None
        try:
            partition = self.nodes.partition_of(job.message.metadata.dst_node_id)
            if outcome.state or (outcome.state is not None and self._states.size_bytes(partition)):
                self._states.put(partition, outcome.state)
        except Exception as error:  # for example a full disk
            # The reply may be in a sum already, so the sums of this set are useless.
            if job.partial_sum is not None:
                job.pending.error = error
            reply = failed(job.message, error)
        job.host.messages += 1
        job.host.failed += reply.has_error()
        self._end(job, reply)

    def _end(self, job: Job, reply: Message) -> None:
        self._forget(job.message_id)
        job.pending.running.pop(job.message_id, None)
        job.pending.put_reply(job.message, reply)

    def _requeue(self, job: Job) -> None:
        """Requeue a message if its reply is still wanted. The next host with room gets it."""
        job.pending.requeue(job)
        if not job.pending.is_pending(job.message_id):
            self._forget(job.message_id)
        self._list_if_waiting(job.pending)

    def _list_if_waiting(self, pending: PendingMessages) -> None:
        if pending.queued_count and pending not in self._waiting:
            self._waiting.append(pending)

    def _take_from_host(self, job: Job, host: Host | None = None) -> bool:
        """Record that a host no longer has a message. Returns True if it had the message until now.

        ``host``: host that must have the message; by default, the job's.
        """
        if self._jobs.get(job.message_id) is not job or (host is not None and job.host is not host):
            return False
        del self._jobs[job.message_id]
        job.host.in_flight -= 1
        job.host.is_exclusive = False
        if not job.host.is_gone:
            self._hosts_with_room.add(job.host)
        return True

    def _forget(self, message_id: str) -> None:
        self._seed_of.pop(message_id, None)
        self._losses.pop(message_id, None)
