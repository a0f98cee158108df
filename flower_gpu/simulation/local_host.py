"""The machine of this process as a host: messages wait for threads, which have workers with leases."""

from __future__ import annotations

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
from flower_gpu.calls.settings import CallSettings, call_settings
from flower_gpu.errors import ConfigError, WorkerStartError
from flower_gpu.flower.averaging import without_arrays
from flower_gpu.gpu import mps
from flower_gpu.options import RUN_DIR_VARIABLE, flag, joined
from flower_gpu.simulation import determinism, workers
from flower_gpu.simulation.host import About, Answer, Answers, GroupSum, Host, Visit, Work
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.lease_turns import LeaseTurns
from flower_gpu.simulation.messages import MessageHandler
from flower_gpu.simulation.slots import Slot
from flower_gpu.workers import state_folder
from flower_gpu.workers.output import AdmitLines, all_lines
from flower_gpu.workers.own_process import restored_environment
from flower_gpu.workers.threads import cores, planned_threads

# Of short messages several are fetched at a time, as each time costs more than a short message does.
_GATHER_S: Final = 0.1
# Of replies and states: so much is fetched at a time, where that is more than one message, and so much may be
# there that nobody has fetched. Then no further message is begun.
_MOST_BYTES: Final = 1 << 26
_MOST_KEPT_BYTES: Final = 1 << 28
_FETCH_S: Final = 1.0  # that whoever exchanges waits, at most


class QueueHost(Host):
    """Messages wait here for a thread, and, handled, to be fetched; whoever exchanges sums the replies."""

    def __init__(self, about: About) -> None:
        super().__init__(about)
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._has_finished = threading.Condition(self._lock)
        self._waiting: deque[Visit] = deque()
        self._finished: deque[tuple[Visit, Answer, int]] = deque()  # with sizes of replies and states
        self._asked: list[int] = []  # groups whose sums are wanted
        self._bytes = 0  # of what is finished
        self._taken = 0  # messages that threads have
        self._first_at = 0.0  # when the first of it was
        self._is_closed = False
        self._to_sum: deque[tuple[Visit, Message]] = deque()  # that :meth:`exchange` has told of
        self._sums: dict[int, GroupSum] = {}
        self._forgotten: set[int] = set()  # groups
        self._handler: MessageHandler
        self._threads: list[threading.Thread] = []

    def start(self, handler: MessageHandler, threads: int) -> None:
        """Start so many threads, each of which has one message handled at a time."""
        self._handler = handler
        self._threads = [
            threading.Thread(target=self._work, name=f"flower-gpu-messages-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def most(self, kind: str) -> int:
        """Return how many messages it has at most: few, since the next ones arrive at once; and batches."""
        few = min(super().most(kind), 2 * self.about.concurrency)
        together = self._handler.batches.largest(kind)
        return few if together == 1 else max(few, len(self._threads) * together)

    def messages_in_batches(self, kind: str) -> int:
        """Return the number of messages in the batches that it handles at a time; 0 if it has no batches."""
        together = self._handler.batches.largest_in_use(kind)
        return 0 if together == 1 else len(self._threads) * together

    def take(self, visits: Sequence[Visit]) -> None:
        """Have messages handled, in this order."""
        with self._lock:
            self._waiting += visits
            self._has_work.notify(len(visits))

    def exchange(self, visits: Sequence[Visit]) -> Answers:
        """Have messages handled; waits, not for long, for what has become of others."""
        self.take(visits)
        self._sum()  # now that workers have their next messages
        answers, asked = self.fetch(_FETCH_S)
        if asked:
            self._sum()
        useless = [number for number, found in list(self._sums.items()) if found.error]
        sums = [found for number in {*asked, *useless} if (found := self._sums.pop(number, None))]
        for found in sums:
            found.settle()
        return Answers(answers, sums)

    def fetch(self, timeout_s: float) -> tuple[list[Answer], list[int]]:
        """Wait for answers, and for groups whose sums are wanted; none where none is in time.

        While others wait for a thread, several are returned at a time. Arrays that are summed here stay here.
        """
        answers: list[Answer] = []
        taken = 0
        with self._lock:
            self._has_finished.wait_for(lambda: self._finished or self._asked or self._is_closed, timeout_s)
            if self._finished:
                left_s = self._first_at + _GATHER_S - time.monotonic()
                self._has_finished.wait_for(self._is_enough, max(0.0, left_s))
            while self._finished and not (answers and taken + self._finished[0][2] > _MOST_BYTES):
                visit, answer, size = self._finished.popleft()
                if visit.group is not None and answer.reply is not None:
                    self._to_sum.append((visit, answer.reply))
                    answer = replace(answer, reply=without_arrays(answer.reply))
                answers.append(answer)
                taken += size
            if self._bytes > _MOST_KEPT_BYTES:
                self._has_work.notify_all()
            self._bytes -= taken
            self._first_at = time.monotonic()
            asked, self._asked = self._asked, []
        return answers, asked

    def _sum(self) -> None:
        while self._to_sum:
            visit, reply = self._to_sum.popleft()
            group = visit.group
            assert group is not None
            if group.number in self._forgotten:
                continue
            if group.number not in self._sums:
                self._sums[group.number] = GroupSum(group)
            self._sums[group.number].add(reply, visit.place, self.name_of(visit))

    def name_of(self, visit: Visit) -> str:
        """Return how errors name the receiver of a message."""
        return f"node {visit.message.metadata.dst_node_id}"

    def ask_for_sum(self, group: int) -> None:
        """Have the sum of a group come with the next answers; the group begins anew."""
        with self._lock:
            self._asked.append(group)
            self._has_finished.notify()

    def forget(self, groups: Sequence[int]) -> None:
        """Give up groups whose sums nobody wants."""
        self._forgotten.update(groups)
        for group in groups:
            self._sums.pop(group, None)

    def cancel(self, message_id: str) -> None:
        """Give up a message, also one that comes later."""
        self.give_back(message_id)
        self._handler.cancel(message_id)

    def give_back(self, only: str | None = None) -> None:
        """Give up all messages that no thread has taken, or only one: others may handle them earlier."""
        with self._lock:
            for visit in [visit for visit in self._waiting if only in (None, visit.message_id)]:
                self._waiting.remove(visit)
                self._finish(visit, Answer(visit.message_id))

    def stuck_since(self) -> float | None:
        """Return since when messages wait and none has a worker; None where that is not so."""
        return self._handler.stuck_since()

    def close(self) -> None:
        """End all workers: those that handle a message at once, the others by themselves."""
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
            visits = self.next(waits=False)
            if not visits:
                self._handler.idle()
                visits = self.next(waits=True)
            if visits:
                answers = self._handler(*visits)
                for visit, answer in zip(visits, answers, strict=True):
                    self.finish(visit, answer)
                del visit, answers, answer
            del visits
        self._handler.leave()

    def next(self, *, waits: bool) -> list[Visit]:
        """Return the next assignment: messages that a worker handles together, most often one.

        It is empty if no message may be handled at this moment, or ever again.
        """
        with self._lock:
            if waits:
                self._has_work.wait_for(self._may_begin)
            if self._is_closed or not self._may_begin():
                return []
            visits = [self._waiting.popleft() for _ in range(self._assignment_size())]
            self._taken += len(visits)
            if self._finished and not self._waiting:
                self._has_finished.notify()  # whoever fetches brings messages
            return visits

    def _assignment_size(self) -> int:
        """Return how many of the waiting messages a worker is to handle now; other threads get their part."""
        first = self._waiting[0]
        kind = first.message.metadata.message_type
        part = -(-(self._taken + len(self._waiting)) // self.about.concurrency)
        limit = min(part, self._handler.batches.largest(kind))
        if limit == 1:
            return 1
        alike = takewhile(partial(self._handler.may_share, first), islice(self._waiting, limit))
        return self._handler.batches.choose(kind, sum(1 for _ in alike))

    def _may_begin(self) -> bool:
        return self._is_closed or (bool(self._waiting) and self._bytes <= _MOST_KEPT_BYTES)

    def finish(self, visit: Visit, answer: Answer) -> None:
        """Take the answer to a message."""
        size = answer.size_bytes
        with self._lock:
            self._taken -= 1
            self._finish(visit, answer, size)

    def _finish(self, visit: Visit, answer: Answer, size: int = 0) -> None:
        if not self._finished:
            self._first_at = time.monotonic()
        self._finished.append((visit, answer, size))
        self._bytes += size
        if len(self._finished) == 1 or self._is_enough():
            self._has_finished.notify()

    def _is_enough(self) -> bool:
        """Tell whether what is finished is to be fetched at once: workers need messages, or memory."""
        return not self._waiting or self._bytes > _MOST_BYTES or bool(self._asked) or self._is_closed


class LocalHost(QueueHost):
    """The machine that this process is on, for one run.

    ``work``: what is to be done.
    ``admit_lines``: decides which lines of clients are shown.
    ``gpus``: its GPUs that can be used.
    """

    can_be_lost: ClassVar = False

    def __init__(self, work: Work, admit_lines: AdmitLines = all_lines) -> None:
        self._run = work
        self._admit_lines = admit_lines
        self._settings = settings = call_settings(work.options, named=flag)
        env = dict(work.options.get("env") or {})
        self._inventory = workers.look_at_gpus()
        self.gpus = list(self._inventory.usable)
        self._decision = leasing.decide(settings.gpu, None, {**os.environ, **settings.worker.env})
        if work.is_deterministic:
            determinism.check_gpus(settings.gpu.on_oom, self.gpus, self._decision.uuids)
        self._of_clients = [
            call_settings(joined(work.options, own), named=flag) for own in work.nodes.clients.resources()
        ]

        def at_once(settings: CallSettings) -> tuple[int, int]:
            leases = workers.most_leases(settings, self._decision.uuids)
            return leases, workers.concurrency(settings, leases, work.max_workers, len(work.nodes.ids))

        # Clients that ask for little are many at a time; what the others get is no less for that.
        self._leases, concurrency = map(max, zip(*map(at_once, self._of_clients), strict=True))
        self._usual = at_once(settings)[1]
        self._variables = workers.variables(self._usual, env, settings.host.num_cpus)
        threads = planned_threads({**os.environ, **self._variables})
        super().__init__(
            About(platform.node(), concurrency, threads, determinism.described(self.gpus), cores(), [])
        )
        self._opened = ExitStack()

    def name_of(self, visit: Visit) -> str:
        """Return how errors name the receiver of a message: by its partition, as the displays do."""
        return f"client {self._run.nodes.partition_of(visit.message.metadata.dst_node_id)}"

    def begin(self, joined: Callable[[Host], object]) -> None:
        """Get ready for messages, and ask for some."""
        self.open()
        joined(self)

    def open(self, *, tries: int = 1) -> None:
        """Get ready for messages.

        ``tries``: how often a message is handled, at most, whose worker dies.
        """
        work, settings = self._run, self._settings
        if work.mps:
            self._opened.enter_context(_packed(self._decision.uuids))
        needs = workers.Needs.of(libraries_in(work.app))
        needs.learn_beside(settings)
        self._without = needs.without
        requests = {each.gpu.request for each in self._of_clients}
        is_known = len(requests) == 1 and not requests.pop().is_auto  # of leases of one size
        turns = LeaseTurns(self._leases or None if is_known else None)
        cores_of_run = workers.core_leases(settings, self._usual, self.about.concurrency, work.name)
        of_calls: dict[str, Any] = {**work.options, "env": self._variables}
        # One more while messages are short: it is written, or its reply read, while the others are computed.
        has_spare = work.max_workers is None and not self._leases
        threads = self.about.concurrency + has_spare
        handler = self.handler = MessageHandler(
            work,
            of_calls,
            lambda: Slot(turns, needs.without, cores_of_run, self._admit_lines),
            workers=threads,
            tries=tries,
            # Without a GPU, messages need not look for one again and again.
            inventory=None if self.gpus else self._inventory,
        )
        self._opened.callback(cores_of_run.close)
        self._opened.callback(turns.close)
        self._opened.callback(handler.close)
        self.start(handler, threads)

    def where(self) -> str:
        """Return a line on the place of messages, or on options without effect."""
        gpu, env = self._settings.gpu, {**os.environ, **self._settings.worker.env}
        gpus = [one for one in self.gpus if one.uuid in self._decision.uuids]
        requests = [each.gpu.request for each in self._of_clients if not each.gpu.request.is_auto]
        if not gpus and requests:
            return notices.without_effect(requests[0], "all calls", notices.why_on_cpu(gpu, None, env))
        is_auto = any(each.gpu.request.is_auto for each in self._of_clients)
        at_once = None if gpus and is_auto else self.about.concurrency
        return notices.calls_run(gpu, gpus, at_once, None, env)

    def has_begun(self) -> None:
        """Do nothing: workers write into the trace themselves."""

    def load_data(self) -> None:
        """Load the data for calls, if there are any.

        Raises ConfigError if that fails: so the run ends here, and not each client's call.
        """
        try:
            workers.load_data(self._settings, self._variables, self._without)
        except WorkerStartError as error:
            raise ConfigError(str(error)) from error

    def facts(self) -> dict[str, Any]:
        """Return the workers' facts for the result."""
        return self.handler.facts()

    def close(self) -> None:
        """End all workers, and let go of all that is held."""
        super().close()
        self._opened.close()


@contextmanager
def _packed(uuids: Sequence[str]) -> Iterator[None]:
    """Run an MPS daemon in the block, of which all workers of this process are clients."""
    folder = os.environ.get(RUN_DIR_VARIABLE)
    logs = None if folder is None else RunFolder(Path(folder)).mps
    parent = state_folder.made_state_dir()
    with mps.daemon(uuids, parent, logs) as variables, restored_environment(variables):
        os.environ.update(variables)
        yield


def libraries_in(app: ClientApp | AppReference) -> list[str]:
    """Return the libraries that an app imports; nothing is imported."""
    if isinstance(app, AppReference):
        return libraries_of(app.folder, app.name.partition(":")[0])
    return libraries_used(vars(app))
