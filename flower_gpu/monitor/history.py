"""What a trace tells, put together: a run, its leases, its workers, its rounds, its GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from flower_gpu import trace
from flower_gpu.gpu.request import format_bytes
from flower_gpu.monitor.fields import mappings, number, text, whole
from flower_gpu.monitor.spans import (
    Evaluation,
    GPUInfo,
    GPUSample,
    LeaseSpan,
    OpenRound,
    OutOfMemory,
    WorkerSpan,
)

_FEW: Final = 50  # of what is not forgotten with ``keep_finished=False``


class History:
    """A run, as far as its trace tells; fed event by event, so that it can be followed while it goes on.

    Parameters
    ----------
    keep_finished : bool
        False: what is over is forgotten, so that a long run takes no more and more memory. Then ``leases``
        and ``workers`` have those that go on only, ``samples`` the last of each GPU, ``evaluations`` and
        ``out_of_memory`` the last few.

    Attributes
    ----------
    kind, name, host, pid, clients, cores
        Of the run; empty or None before ``run_started`` was read.
    num_rounds : int or None
        How many there will be, where that is known.
    started_at, finished_at, last_at : float or None
        When the run began, ended, and when the last event was written.
    outcome : str
        How it ended; empty while it runs, or where it was killed.
    failed_messages, all_messages : int or None
        How many messages to clients failed until then, and how many were sent; None where nobody has said.
    gpus : dict of str to GPUInfo
        By UUID.
    samples : dict of str to list of GPUSample
        By UUID, in the order of time.
    leases : list of LeaseSpan
    workers : list of WorkerSpan
        In the order of their starts.
    evaluations : list of Evaluation
    out_of_memory : list of OutOfMemory
    open_round : OpenRound or None
        The messages that are under way in a simulation.
    """

    def __init__(self, *, keep_finished: bool = True) -> None:
        self._keep_finished = keep_finished
        self.kind = self.name = self.host = self.outcome = ""
        self.failed_messages: int | None = None
        self.all_messages: int | None = None
        self.pid: int | None = None
        self.clients: int | None = None
        self.cores: int | None = None
        self.num_rounds: int | None = None
        self.started_at: float | None = None
        self.finished_at: float | None = None
        self.last_at: float | None = None
        self.gpus: dict[str, GPUInfo] = {}
        self.samples: dict[str, list[GPUSample]] = {}
        self.leases: list[LeaseSpan] = []
        self.workers: list[WorkerSpan] = []
        self.evaluations: list[Evaluation] = []
        self.out_of_memory: list[OutOfMemory] = []
        self.open_round: OpenRound | None = None
        self._requests: dict[str, LeaseSpan] = {}  # by call, that wait
        self._leases: dict[str, LeaseSpan] = {}  # by id
        self._running: dict[tuple[str, int], WorkerSpan] = {}  # by call and pid
        self._last_round: int | None = None  # of a worker

    @classmethod
    def read(cls, path: Path) -> History:
        """Read a whole trace."""
        history = cls()
        history.feed(trace.read(path))
        return history

    def feed(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in events, oldest first. What is not understood is left out: a trace may be cut anywhere."""
        for event in events:
            time = number(event.get("time"))
            handler = getattr(self, f"_on_{event.get('event')}", None)
            if time is None:
                continue
            self.last_at = max(self.last_at or time, time)
            if handler is not None:
                handler(time, event)
        if not self._keep_finished:
            self._forget_finished()

    @property
    def waiting(self) -> list[LeaseSpan]:
        """Requests that wait for a lease, the oldest first."""
        return list(self._requests.values())

    @property
    def running(self) -> list[WorkerSpan]:
        """Workers that have not ended, the oldest first."""
        return list(self._running.values())

    def lease_of(self, worker: WorkerSpan) -> LeaseSpan | None:
        """Return the lease that a worker has; None on the CPU."""
        return self._leases.get(worker.lease)

    @property
    def current_round(self) -> int | None:
        """The round that is under way, or was last: the highest that anything is of."""
        if self.open_round is not None and self.open_round.round is not None:
            return self.open_round.round
        rounds = [worker.round for worker in self.workers[-50:] if worker.round is not None]
        rounds += [evaluation.round for evaluation in self.evaluations[-1:]]
        if not self._keep_finished and self._last_round is not None:
            rounds.append(self._last_round)
        return max(rounds, default=None)

    def _forget_finished(self) -> None:
        self.workers = list(self._running.values())
        self._leases = {id_: span for id_, span in self._leases.items() if span.released_at is None}
        self.leases = [*self._requests.values(), *self._leases.values()]
        for samples in self.samples.values():
            del samples[:-1]
        del self.evaluations[:-_FEW]
        del self.out_of_memory[:-_FEW]

    # The run

    def _on_run_started(self, time: float, event: Mapping[str, Any]) -> None:
        # A run that is resumed begins again; its times are those of the first.
        self.started_at = time if self.started_at is None else self.started_at
        self.finished_at, self.outcome = None, ""
        if not self._keep_finished:  # what the one before has left open was killed with it
            self._requests, self._leases, self._running = {}, {}, {}
        self.kind, self.name = text(event.get("kind")), text(event.get("name"))
        self.host, self.pid = text(event.get("host")), whole(event.get("pid"))
        self.clients, self.cores = whole(event.get("clients")), whole(event.get("cores"))
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds
        for told in mappings(event.get("gpus")):
            self._learn_gpu(told)

    def _on_run_finished(self, time: float, event: Mapping[str, Any]) -> None:
        self.finished_at, self.outcome = time, text(event.get("outcome"))
        self.failed_messages, self.all_messages = whole(event.get("failed")), whole(event.get("messages"))
        self.open_round = None

    def _on_gpu_sample(self, time: float, event: Mapping[str, Any]) -> None:
        for told in mappings(event.get("gpus")):
            self._learn_gpu(told)
            self.samples.setdefault(text(told.get("uuid")), []).append(
                GPUSample(
                    time,
                    whole(told.get("used_bytes")),
                    number(told.get("utilization_percent")),
                    number(told.get("temperature_c")),
                )
            )

    def _learn_gpu(self, told: Mapping[str, Any]) -> None:
        gpu = self.gpus.setdefault(text(told.get("uuid")), GPUInfo(text(told.get("uuid"))))
        index = whole(told.get("index"))
        gpu.index = gpu.index if index is None else index
        gpu.name = text(told.get("name")) or gpu.name
        gpu.total_bytes = whole(told.get("total_bytes")) or gpu.total_bytes
        gpu.capacity_bytes = whole(told.get("capacity_bytes")) or gpu.capacity_bytes

    # Rounds

    def _on_strategy_started(self, time: float, event: Mapping[str, Any]) -> None:
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds

    def _on_round_started(self, time: float, event: Mapping[str, Any]) -> None:
        self.open_round = OpenRound(
            whole(event.get("round")), text(event.get("task")), whole(event.get("messages")), time
        )

    def _on_round_grew(self, time: float, event: Mapping[str, Any]) -> None:
        if (open_round := self._open_round_of(event)) is not None:
            open_round.messages = whole(event.get("messages"))

    def _on_reply(self, time: float, event: Mapping[str, Any]) -> None:
        if (open_round := self._open_round_of(event)) is not None:
            open_round.replies += 1

    def _open_round_of(self, event: Mapping[str, Any]) -> OpenRound | None:
        told = (whole(event.get("round")), text(event.get("task")))
        one = self.open_round
        return one if one is not None and (one.round, one.task) == told else None

    def _on_round_finished(self, time: float, event: Mapping[str, Any]) -> None:
        self.open_round = None
        self._evaluated(time, event, text(event.get("task")))

    def _on_round(self, time: float, event: Mapping[str, Any]) -> None:
        self.num_rounds = whole(event.get("num_rounds")) or self.num_rounds
        self._evaluated(time, event, "server-evaluate")

    def _evaluated(self, time: float, event: Mapping[str, Any], task: str) -> None:
        server_round, metrics = whole(event.get("round")), event.get("metrics")
        if server_round is None or not isinstance(metrics, Mapping):
            return
        known = {str(name): value for name, told in metrics.items() if (value := number(told)) is not None}
        found = Evaluation(time, server_round, task, known, number(event.get("seconds")))
        same = [one for one in self.evaluations if (one.round, one.task) == (server_round, task)]
        if not same:
            self.evaluations.append(found)
            return
        # What a strategy and a simulation both tell, or a round that was done again after a resume.
        same[0].time, same[0].metrics = time, {**same[0].metrics, **known}
        same[0].seconds = found.seconds if found.seconds is not None else same[0].seconds

    # Leases

    def _on_lease_requested(self, time: float, event: Mapping[str, Any]) -> None:
        span = LeaseSpan(
            *_whose(event), requested_at=time, caller_pid=whole(event.get("caller_pid")), asked=_asked(event)
        )
        self._requests[span.call] = span
        self.leases.append(span)

    def _on_lease_granted(self, time: float, event: Mapping[str, Any]) -> None:
        span = self._requests.pop(text(event.get("call")), None)
        if span is None:
            span = LeaseSpan(*_whose(event), requested_at=None)
            self.leases.append(span)
        span.granted_at, span.id = time, text(event.get("lease"))
        for told in mappings(event.get("gpus")):
            self._learn_gpu(told)
            span.memory_bytes[text(told.get("uuid"))] = whole(told.get("memory_bytes")) or 0
        self._leases[span.id] = span

    def _on_lease_not_granted(self, time: float, event: Mapping[str, Any]) -> None:
        span = self._requests.pop(text(event.get("call")), None)
        if span is not None:
            span.refused_at = time

    def _on_lease_released(self, time: float, event: Mapping[str, Any]) -> None:
        span = self._leases.get(text(event.get("lease")))
        if span is not None:
            span.released_at = time

    # Workers

    def _on_worker_started(self, time: float, event: Mapping[str, Any]) -> None:
        worker = WorkerSpan(
            *_whose(event),
            pid=whole(event.get("pid")) or 0,
            start_method=text(event.get("start_method")),
            lease=text(event.get("lease")),
            started_at=time,
        )
        self._running[worker.call, worker.pid] = worker
        self._last_round = worker.round if worker.round is not None else self._last_round
        self.workers.append(worker)

    def _on_task_started(self, time: float, event: Mapping[str, Any]) -> None:
        if (worker := self._of(event)) is not None:
            worker.task_at = time

    def _on_cuda_started(self, time: float, event: Mapping[str, Any]) -> None:
        if (worker := self._of(event)) is not None:
            worker.cuda_at = time

    def _on_worker_result(self, time: float, event: Mapping[str, Any]) -> None:
        if (worker := self._of(event)) is not None:
            worker.result_at = time

    def _on_progress(self, time: float, event: Mapping[str, Any]) -> None:
        if (worker := self._of(event)) is not None:
            worker.task_at = worker.task_at or time
            worker.progress = (
                text(event.get("desc")), whole(event.get("n")) or 0, whole(event.get("total")),
            )  # fmt: skip

    def _on_worker_finished(self, time: float, event: Mapping[str, Any]) -> None:
        worker = self._of(event)
        if worker is None:
            return  # its start was cut off: nobody knows when that was
        del self._running[worker.call, worker.pid]
        worker.finished_at = time
        worker.outcome, worker.error = text(event.get("outcome")), text(event.get("error"))
        worker.task_at = number(event.get("task_at")) or worker.task_at
        worker.cuda_at = number(event.get("cuda_at")) or worker.cuda_at
        worker.result_at = number(event.get("result_at")) or worker.result_at
        for told in mappings(event.get("gpus")):
            for name, into in (("peak_bytes", worker.peak_bytes), ("cap_bytes", worker.cap_bytes)):
                if (nbytes := whole(told.get(name))) is not None:
                    into[text(told.get("uuid"))] = nbytes
        if self.open_round is not None and worker.round == self.open_round.round:
            self.open_round.workers_finished += 1

    def _on_out_of_memory(self, time: float, event: Mapping[str, Any]) -> None:
        names = ("client", "task", "uuid", "kind", "then")
        self.out_of_memory.append(OutOfMemory(time, *(text(event.get(name)) for name in names)))

    def _of(self, event: Mapping[str, Any]) -> WorkerSpan | None:
        call, pid = text(event.get("call")), whole(event.get("pid")) or 0
        if not call:  # older traces do not say it of progress; a process does one call at a time
            return next((one for one in reversed(self._running.values()) if one.pid == pid), None)
        return self._running.get((call, pid))


def _whose(event: Mapping[str, Any]) -> tuple[str, str, str, int | None]:
    call, client, task = (text(event.get(name)) for name in ("call", "client", "task"))
    return call, client, task, whole(event.get("round"))


def _asked(event: Mapping[str, Any]) -> str:
    """Say what a request is for: ``"4 GiB"``, ``"0.25"`` of a GPU, ``"a whole GPU"``, or ``"auto"``."""
    count, share = whole(event.get("count")) or 1, number(event.get("share"))
    memory_bytes = whole(event.get("memory_bytes"))
    if memory_bytes is not None:
        return format_bytes(memory_bytes)
    if event.get("alone") is True:
        return "a whole GPU"
    if share is not None:
        return f"{share * count:g}"
    return "auto"
