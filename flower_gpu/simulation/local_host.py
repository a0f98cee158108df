"""The local host: a queue of messages, and threads with one worker each that handle them.

::

    dispatcher ──take, exchange──> _waiting ──next──> thread: MessageHandler, a worker with a lease
        ▲                                               │
        └──────fetch────── _finished <─────finish───────┘

:class:`QueueHost` is the queue, without processes or GPUs. :class:`LocalHost` adds what this machine has:
settings, leases, environment variables and the threads of one run. In a cluster, each agent has a LocalHost.

Workers should never wait for messages, and messages take milliseconds or hours. Large replies must not fill
the memory. So one exchange fetches several outcomes of short messages, and the exchange thread wakes up as
soon as the queue is empty. No message begins while too many replies are unfetched.

Threads:

- The dispatcher's giver calls ``submit``. The host's exchange thread calls ``exchange``, which takes the next
  messages, adds replies to sums, and waits up to 1 s for outcomes. Only one thread exchanges at a time.
- Each message thread (``_work``) repeats: get an assignment with ``next``, let the handler run it in a
  worker, and store the outcomes with ``finish``.
- Any thread may call ``cancel``, ``return_queued``, ``ask_for_sum``, ``forget`` and ``close``.

One lock protects the queue, and two conditions share it. ``_has_work`` wakes message threads: messages came,
memory is free again, or the host closes. ``_has_finished`` wakes the exchange thread: there are outcomes, a
sum was asked for, or the host closes.

Sums. If a host sums replies, their arrays never leave the host. ``fetch`` moves the reply into
``_to_sum`` and returns the outcome without arrays. The exchange thread adds it outside the lock after it has
queued the next messages, so that workers do not wait for additions. When an exchange returns a sum, the sum
contains all replies of its group in the outcomes up to then.

Retries. When a message is cancelled or given back before a thread takes it, its MessageOutcome has no reply.
The dispatcher requeues the message if it is still wanted. The handler itself retries a message after the
death of its worker (:mod:`flower_gpu.simulation.messages`).
"""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, ClassVar, Final

from flwr.app import Message
from flwr.clientapp import ClientApp

from flower_gpu.apps.app_imports import libraries_of, libraries_used
from flower_gpu.apps.folder import RunFolder
from flower_gpu.calls import leasing, notices
from flower_gpu.calls.grants import mps
from flower_gpu.calls.settings import CallSettings
from flower_gpu.errors import ConfigError, WorkerStartError
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.simulation import determinism, workers
from flower_gpu.simulation.clients import settings_of
from flower_gpu.simulation.host import (
    AssignedMessage,
    GroupSum,
    Host,
    HostInfo,
    HostReport,
    MessageOutcome,
    Work,
)
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.messages import MessageHandler
from flower_gpu.simulation.pool import WorkerPool
from flower_gpu.strategies.averaging import without_arrays
from flower_gpu.workers import state_folder
from flower_gpu.workers.output import AdmitLines, all_lines
from flower_gpu.workers.own_process import restored_environment
from flower_gpu.workers.threads import cores, planned_threads

# Seconds to gather outcomes of short messages. An exchange costs more than a short message.
_GATHER_S: Final = 0.1
# Maximum bytes of replies and states in one fetch, unless a single outcome is larger.
_MAX_FETCH_BYTES: Final = 1 << 26
# No further message begins while unfetched replies and states take more bytes than this.
_MAX_KEPT_BYTES: Final = 1 << 28
# Seconds that an exchange waits for outcomes.
_FETCH_S: Final = 1.0


class QueueHost(Host):
    """A host with a queue of messages, threads that handle them, and a queue of finished messages.

    The thread that calls :meth:`exchange` also sums the replies.
    """

    def __init__(self, info: HostInfo) -> None:
        super().__init__(info)
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_finished = threading.Condition(self._lock)
        self._waiting: deque[AssignedMessage] = deque()
        # Finished messages with the bytes of their replies and states
        self._finished: deque[tuple[AssignedMessage, MessageOutcome, int]] = deque()
        self._asked: list[int] = []  # numbers of the groups to send sums of
        self._bytes = 0  # bytes of all finished messages
        self._taken = 0  # number of messages that threads handle
        self._first_at = 0.0  # time at which the oldest unfetched message finished
        self._is_closed = False
        self._to_sum: deque[tuple[AssignedMessage, Message]] = deque()  # fetched replies to add to sums
        self._sums: dict[int, GroupSum] = {}
        self._forgotten: set[int] = set()  # numbers of abandoned groups
        self._handler: MessageHandler
        self._threads: list[threading.Thread] = []

    def start(self, handler: MessageHandler, threads: int) -> None:
        """Start the message threads. Each handles one assignment at a time.

        ``threads``: number of threads.
        """
        self._handler = handler
        self._threads = [
            threading.Thread(target=self._work, name=f"flower-gpu-messages-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def capacity(self, kind: str) -> int:
        """Return the maximum number of messages that this host has at a time.

        This is twice its concurrency, because the next messages arrive at once. With batches, it is enough
        for one full batch per thread.
        """
        few = min(super().capacity(kind), 2 * self.info.concurrency)
        batch_size = self._handler.batches.largest(kind)
        return few if batch_size == 1 else max(few, len(self._threads) * batch_size)

    def messages_in_batches(self, kind: str) -> int:
        """Return the number of messages in the batches handled at a time, or 0 without batches."""
        batch_size = self._handler.batches.largest_in_use(kind)
        return 0 if batch_size == 1 else len(self._threads) * batch_size

    def submit(self, assigned_messages: Sequence[AssignedMessage]) -> None:
        """Add messages to the queue, in this order."""
        with self._lock:
            self._waiting += assigned_messages
            self._has_work.notify(len(assigned_messages))

    def exchange(self, assigned_messages: Sequence[AssignedMessage]) -> HostReport:
        """Queue messages, and wait up to 1 s. Returns outcomes of earlier messages, and finished sums."""
        self.submit(assigned_messages)
        # Workers have their next messages now, so they do not wait for these additions.
        self._sum()
        outcomes, asked = self.fetch(_FETCH_S)
        if asked:
            self._sum()
        useless = [number for number, total in list(self._sums.items()) if total.error]
        sums = [total for number in {*asked, *useless} if (total := self._sums.pop(number, None))]
        for total in sums:
            total.settle()
        return HostReport(outcomes, sums)

    def fetch(self, timeout_s: float) -> tuple[list[MessageOutcome], list[int]]:
        """Wait for outcomes and requests for sums. Returns the outcomes and the numbers of the groups.

        Both are empty after a timeout. While messages wait for a thread, several outcomes are gathered and
        returned together. Arrays that are summed here are left out of the outcomes.

        ``timeout_s``: seconds to wait for the first outcome or request.
        """
        outcomes: list[MessageOutcome] = []
        taken = 0
        with self._lock:
            self._has_finished.wait_for(lambda: self._finished or self._asked or self._is_closed, timeout_s)
            if self._finished:
                remaining_s = self._first_at + _GATHER_S - time.monotonic()
                self._has_finished.wait_for(self._is_enough, max(0.0, remaining_s))
            while self._finished and not (outcomes and taken + self._finished[0][2] > _MAX_FETCH_BYTES):
                assigned, outcome, size = self._finished.popleft()
                if assigned.group is not None and outcome.reply is not None:
                    self._to_sum.append((assigned, outcome.reply))
                    outcome = replace(outcome, reply=without_arrays(outcome.reply))
                outcomes.append(outcome)
                taken += size
            if self._bytes > _MAX_KEPT_BYTES:
                self._has_work.notify_all()
            self._bytes -= taken
            self._first_at = time.monotonic()
            asked, self._asked = self._asked, []
        return outcomes, asked

    def _sum(self) -> None:
        while self._to_sum:
            assigned, reply = self._to_sum.popleft()
            group = assigned.group
            assert group is not None
            if group.number in self._forgotten:
                continue
            if group.number not in self._sums:
                self._sums[group.number] = GroupSum(group)
            self._sums[group.number].add(reply, assigned.place, self.name_of(assigned))

    def name_of(self, assigned: AssignedMessage) -> str:
        """Return the receiver of a message as errors name it."""
        return f"node {assigned.message.metadata.dst_node_id}"

    def ask_for_sum(self, group: int) -> None:
        """Request the sum of a group with the next outcomes. Later replies go into a new sum."""
        with self._lock:
            self._asked.append(group)
            self._has_finished.notify()

    def forget(self, group: int) -> None:
        """Drop the sum of an abandoned group, and all its later replies."""
        self._forgotten.add(group)
        self._sums.pop(group, None)

    def cancel(self, message_id: str) -> None:
        """Cancel a message. If it has not arrived yet, it is cancelled on arrival."""
        self.return_queued(message_id)
        self._handler.cancel(message_id)

    def return_queued(self, only: str | None = None) -> None:
        """Return all queued messages to the dispatcher, because other hosts may handle them earlier.

        ``only``: id of a single message to return.
        """
        with self._lock:
            for assigned in [assigned for assigned in self._waiting if only in (None, assigned.message_id)]:
                self._waiting.remove(assigned)
                self._finish(assigned, MessageOutcome(assigned.message_id))

    def stuck_since(self) -> float | None:
        """Return the time since which messages have been waiting with no worker running, or None."""
        return self._handler.stuck_since()

    def close(self) -> None:
        """End all threads and their workers. Busy workers are killed, idle ones end by themselves."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            self._has_work.notify_all()
            self._has_finished.notify_all()
        if self._threads:
            self._handler.cancel_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while not self._is_closed:
            assigned_messages = self.next(is_blocking=True)
            if assigned_messages:
                outcomes = self._handler(*assigned_messages)
                for assigned, outcome in zip(assigned_messages, outcomes, strict=True):
                    self.finish(assigned, outcome)
                del assigned, outcomes, outcome
            del assigned_messages

    def next(self, *, is_blocking: bool) -> list[AssignedMessage]:
        """Return the next assignment: the messages that a worker handles together, usually one.

        The list is empty if no message may begin now or the host is closed.

        ``is_blocking``: True to block until a message may begin.
        """
        with self._lock:
            if is_blocking:
                self._has_work.wait_for(self._may_begin)
            if self._is_closed or not self._may_begin():
                return []
            assigned_messages = [self._waiting.popleft() for _ in range(self._assignment_size())]
            self._taken += len(assigned_messages)
            # The queue is empty now. The exchange thread brings new messages after it has fetched outcomes.
            if self._finished and not self._waiting:
                self._has_finished.notify()
            return assigned_messages

    def _assignment_size(self) -> int:
        """Return the number of queued messages for the next assignment. Other threads get their share."""
        first = self._waiting[0]
        kind = first.message.metadata.message_type
        part = -(-(self._taken + len(self._waiting)) // self.info.concurrency)
        limit = min(part, self._handler.batches.largest(kind))
        if limit == 1:
            return 1
        alike = takewhile(partial(self._handler.may_share, first), islice(self._waiting, limit))
        return self._handler.batches.choose(kind, sum(1 for _ in alike))

    def _may_begin(self) -> bool:
        return self._is_closed or (bool(self._waiting) and self._bytes <= _MAX_KEPT_BYTES)

    def finish(self, assigned: AssignedMessage, outcome: MessageOutcome) -> None:
        """Store the outcome of a message until it is fetched."""
        size = outcome.size_bytes
        with self._lock:
            self._taken -= 1
            self._finish(assigned, outcome, size)

    def _finish(self, assigned: AssignedMessage, outcome: MessageOutcome, size: int = 0) -> None:
        if not self._finished:
            self._first_at = time.monotonic()
        self._finished.append((assigned, outcome, size))
        self._bytes += size
        if len(self._finished) == 1 or self._is_enough():
            self._has_finished.notify()

    def _is_enough(self) -> bool:
        """Return True if outcomes should be fetched at once, because workers need messages or memory."""
        return not self._waiting or self._bytes > _MAX_FETCH_BYTES or bool(self._asked) or self._is_closed


class LocalHost(QueueHost):
    """The machine of this process as a host of one run.

    ``work``: description of the run.
    ``admit_lines``: decides which lines of the clients' output are shown.
    ``gpus``: the usable GPUs.
    """

    can_be_lost: ClassVar = False

    def __init__(self, work: Work, admit_lines: AdmitLines = all_lines) -> None:
        self._run = work
        self._admit_lines = admit_lines
        self._settings = settings = work.settings
        self._inventory = workers.look_at_gpus()
        self.gpus = list(self._inventory.usable)
        self._decision = leasing.decide(settings.gpu, None, {**os.environ, **settings.worker.env})
        if work.is_deterministic:
            determinism.check_gpus(settings.gpu.on_oom, self.gpus, self._decision.uuids)
        # The distinct settings of clients
        self._client_settings = [
            settings_of(settings, overrides) for overrides in work.nodes.clients.resources()
        ]

        def leases_and_concurrency(settings: CallSettings) -> tuple[int, int]:
            leases = workers.max_leases(settings, self._decision.uuids)
            return leases, workers.concurrency(settings, leases, work.max_workers, len(work.nodes.ids))

        # Many clients with small needs can run at a time, so these decide. Clients with larger needs still
        # get all that they ask for.
        self._leases, concurrency = map(
            max, zip(*map(leases_and_concurrency, self._client_settings), strict=True)
        )
        self._usual_concurrency = leases_and_concurrency(settings)[1]
        self._variables = workers.variables(
            self._usual_concurrency, settings.worker.env, settings.host.num_cpus
        )
        threads = planned_threads({**os.environ, **self._variables})
        super().__init__(
            HostInfo(platform.node(), concurrency, threads, determinism.described(self.gpus), cores(), [])
        )
        self._opened = ExitStack()

    def name_of(self, assigned: AssignedMessage) -> str:
        """Return the receiver of a message as errors name it: by its partition, as the displays do."""
        return f"client {self._run.nodes.partition_of(assigned.message.metadata.dst_node_id)}"

    def begin(self, joined: Callable[[Host], object]) -> None:
        """Start the message threads, and report this host to ``joined``."""
        self.open()
        joined(self)

    def open(self, *, tries: int = 1) -> None:
        """Start the message threads and everything that they share, such as the MPS daemon.

        ``tries``: maximum number of attempts at a message when workers die.
        """
        work, settings = self._run, self._settings
        if work.mps:
            self._opened.enter_context(_packed(self._decision.uuids))
        needs = workers.Needs.of(libraries_in(work.app))
        needs.learn_beside(settings)
        self._without = needs.without
        requests = {client_settings.gpu.request for client_settings in self._client_settings}
        # The number of concurrent leases is known only if all have the same fixed size.
        is_known = len(requests) == 1 and not requests.pop().is_auto
        pool = WorkerPool(
            self._leases if is_known and self._leases else math.inf,
            workers.core_share(settings, self._usual_concurrency, self.info.concurrency, work.name),
            needs.without,
            self._admit_lines,
        )
        # A spare thread helps with short messages: while workers compute, it sends a message or reads a
        # reply.
        has_spare = work.max_workers is None and not self._leases
        threads = self.info.concurrency + has_spare
        handler = self.handler = MessageHandler(
            work,
            settings.derived({"env": self._variables}),
            pool,
            workers=threads,
            tries=tries,
            # If this host has no GPU, messages need not search for GPUs again.
            inventory=None if self.gpus else self._inventory,
        )
        self._opened.callback(pool.close)
        self.start(handler, threads)

    def location_line(self) -> str:
        """Return a line that says where calls run, or that options have no effect."""
        gpu, env = self._settings.gpu, {**os.environ, **self._settings.worker.env}
        gpus = [usable for usable in self.gpus if usable.uuid in self._decision.uuids]
        client_requests = [client_settings.gpu.request for client_settings in self._client_settings]
        requests = [request for request in client_requests if not request.is_auto]
        if not gpus and requests:
            return notices.without_effect(requests[0], "all calls", notices.why_on_cpu(gpu, None, env))
        is_auto = any(request.is_auto for request in client_requests)
        concurrency = None if gpus and is_auto else self.info.concurrency
        return notices.calls_run(gpu, gpus, concurrency, None, env)

    def has_begun(self) -> None:
        """Do nothing. Workers write into the trace themselves."""

    def load_data(self) -> None:
        """Load the shared data for calls, if the options name any.

        Raises ConfigError if that fails, so that the run ends before each client's call fails.
        """
        try:
            workers.load_data(self._settings, self._variables, self._without)
        except WorkerStartError as error:
            raise ConfigError(str(error)) from error

    def facts(self) -> dict[str, Any]:
        """Return the facts about this host's workers for the result."""
        return self.handler.facts()

    def close(self) -> None:
        """End all workers, and release all resources of the run."""
        super().close()
        self._opened.close()


@contextmanager
def _packed(uuids: Sequence[str]) -> Iterator[None]:
    """Run an MPS daemon in the block. All workers of this process are its clients."""
    folder = os.environ.get(RUN_DIR_VARIABLE)
    logs = None if folder is None else RunFolder(Path(folder)).mps
    parent = state_folder.made_state_dir()
    with mps.daemon(uuids, parent, logs) as variables, restored_environment(variables):
        os.environ.update(variables)
        yield


def libraries_in(app: ClientApp | AppReference) -> list[str]:
    """Return the libraries that an app imports, without importing them."""
    if isinstance(app, AppReference):
        return libraries_of(app.folder, app.name.partition(":")[0])
    return libraries_used(vars(app))
