"""The tries of one call, each in a worker and under a lease.

The lease is held from before the worker starts until the worker is gone.

A try acquires its lease by ``Workers.hold``. This is :meth:`flower_gpu.calls.leasing.Leasing.hold` by
default. In a simulation, a worker may keep its lease from call to call.

A call is tried again in these cases:

- GPU memory ran out: again with more of a GPU or a whole GPU, and at the end on the CPU if ``on_oom`` is
  "cpu". Not with "fail".
- Main memory ran out and the kernel killed the worker: once again with all main memory that leases can have.
  In a simulation, it runs while no other message does. Not with "fail".
- No fork server can run the call: again in a worker that is forked from this process.

The error of an earlier try is kept without its traceback. The frames have the arguments of the call, which
would stay in memory, and the frame of the retry would refer to itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

from flower_gpu import files, trace
from flower_gpu.calls import grants, notices, out_of_memory
from flower_gpu.calls.grants.grant import Terms
from flower_gpu.calls.leasing import Leasing, is_worker
from flower_gpu.calls.settings import CallSettings
from flower_gpu.calls.worker_report import ProgressDisplay, WorkerReport
from flower_gpu.errors import (
    GPUOutOfMemoryError,
    GPUUnavailableError,
    LeaseTimeoutError,
    WorkerDiedError,
    text_of,
)
from flower_gpu.frameworks.out_of_memory import says_device_is_busy
from flower_gpu.leases.lease import Lease, LeaseRequest
from flower_gpu.leases.tickets import Ticket
from flower_gpu.workers import caller as worker
from flower_gpu.workers import events, own_process, threads
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call, Task
from flower_gpu.workers.methods import StartMethod

#: Name of calls that no client makes: server-side evaluation, initial weights.
SERVER: Final = "server"


class Workers:
    """The source of workers and leases of calls. In this class, each call has its own worker and lease."""

    shows_progress = True  # True if the progress of a call is drawn
    is_used_again = False  # True if the worker of the call has run earlier calls
    is_cancelled = False  # True if the call was cancelled. The end of its worker is then no failure
    takes_over = True  # True if workers take over the settings of this process, see workers.caller_settings
    learns_memory = True  # True if later calls request the main memory that this call has used
    # How a call is tried again that ran out of main memory
    second_try = "It is retried with all the main memory that can be leased"

    def choose(self, start_method: str, *, server_first: bool = False) -> StartMethod:
        """Return a start method, as :func:`flower_gpu.workers.methods.choose` does."""
        return start.choose(start_method, server_first=server_first)

    def run(self, call: Call, method: StartMethod, **options: Any) -> Any:
        """Run a call in a worker, as :func:`flower_gpu.workers.caller.run` does."""
        return worker.run(call, method, **options)

    def hold(self, leasing_: Leasing, request: LeaseRequest) -> AbstractContextManager[tuple[Lease, Ticket]]:
        """Hold a lease, as :meth:`flower_gpu.calls.leasing.Leasing.hold` does."""
        return leasing_.hold(request)

    def end_idle(self) -> None:
        """End all idle workers with a lease, after a fault that affects them, too. This class has none."""

    def hold_cores(self, leasing_: Leasing) -> AbstractContextManager[tuple[Lease, Ticket] | None]:
        """Hold cores and main memory, as :meth:`flower_gpu.calls.leasing.Leasing.hold_cores` does."""
        return leasing_.hold_cores()


@dataclass
class Tries:
    """One call, and the results of its latest try."""

    task: Task
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    settings: CallSettings
    environ: Mapping[str, str]  # environment variables of this process and of the call
    label: str
    fields: Mapping[str, Any]
    workers: Workers
    by_name: bool  # True if the task is given by name and, as far as is known, a fork server can run it
    clients: Sequence[str] = ()  # the clients of a call for several of them
    events: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # of the latest worker
    method: StartMethod = start.SPAWN  # start method of the latest worker
    memory_bytes: int = 0  # peak of the latest worker's main memory, as far as known
    was_killed: bool = False  # True if the latest worker died; it may have needed more memory

    def run(self, leasing: Leasing) -> Any:
        """Return the result of the call, which runs under a lease.

        If the kernel killed the worker because main memory ran out, the call is tried again with all main
        memory.
        """
        run_once = self._on_gpu if leasing.uuids else self._on_cpu
        try:
            return run_once(leasing)
        except WorkerDiedError as error:
            if not error.is_out_of_memory or not self._may_have_more_memory(leasing):
                raise
            reason = str(error).partition("\n")[0]
            # The frames of the traceback would keep the arguments in memory.
            killed = error.with_traceback(None)
        notices.say(f"{reason}\n{self.workers.second_try}")
        try:
            return run_once(replace(leasing, asks_for_all_memory=True))
        except LeaseTimeoutError as late:
            raise LeaseTimeoutError(f"{reason}\nThen {late}") from killed
        except WorkerDiedError as error:
            if not error.is_out_of_memory:
                raise
            raise WorkerDiedError(
                f"{error} That was its second try. Use smaller batches or fewer processes of a DataLoader, "
                "or give the host more memory",
                exitcode=error.exitcode,
                tail=error.tail,
                is_out_of_memory=True,
                peak_bytes=error.peak_bytes,
            ) from killed

    def _may_have_more_memory(self, leasing: Leasing) -> bool:
        # Several messages that are handled together are retried by their caller, in smaller batches.
        if len(self.clients) > 1 or self.settings.gpu.on_oom == "fail":
            return False
        return leasing.host.is_leased or not self.workers.learns_memory

    def _on_gpu(self, leasing: Leasing) -> Any:
        """Return the result of the call on a GPU. If its memory runs out, try again with another lease."""
        requests = [leasing.settings.request]
        what, text, ran_out = "", "", None
        while True:
            with ExitStack() as stack:
                try:
                    lease, ticket = stack.enter_context(self.workers.hold(leasing, requests[-1]))
                except LeaseTimeoutError as late:
                    if ran_out is None:
                        raise
                    if not self._may_use_cpu():
                        raise self._failed(text, len(requests) - 1, f"Then {late}") from ran_out
                    notices.say_out_of_memory(f"{what}: it runs on the CPU", f"{text}. Then {late}")
                    break
                is_done = False
                try:
                    value = self._on_lease(lease, ticket)
                    is_done = True
                    return value
                except Exception as error:
                    out = self.events.get("out_of_memory")
                    if out is None and says_device_is_busy(error):
                        raise notices.refused(self.label, lease) from error
                    if out is None and (fault := grants.fault(error, lease, self.environ)):
                        self.workers.end_idle()
                        raise GPUUnavailableError(f"{self.label}: {fault}. {text_of(error)}") from error
                    if out is None:
                        raise
                    leasing.learn_at_least(out, lease)
                    text = f"{self.label}: {out_of_memory.describe(out, lease)}"
                    what = out_of_memory.what_happened(self.label, out, lease)
                    others = notices.who_else(lease, out["uuid"])
                    following = None
                    if not self._runs_here():
                        following = out_of_memory.next_request(out, lease, requests, self.settings.gpu.on_oom)
                    then = "again" if following else "on the CPU" if self._may_use_cpu() else "failed"
                    trace.write("out_of_memory", **self.fields, lease=lease.id, **out, then=then)
                    if then == "failed":
                        raise self._failed(text, len(requests), f"Also there: {others}") from error
                    # The frames of the traceback would keep the arguments in memory.
                    ran_out = error.with_traceback(None)
                finally:
                    if figures := self.events.get("gpu_memory"):
                        leasing.learn(figures, lease, is_done=is_done)
                    leasing.learn_memory(self.memory_bytes, is_done=not self.was_killed)
            notices.say_out_of_memory(f"{what}: it runs {then}", f"{text}. Also there: {others}")
            if following is None:
                break
            requests.append(following)
        return self._on_cpu(replace(leasing, uuids=()))

    def _on_cpu(self, leasing: Leasing) -> Any:
        """Return the result of the call without a GPU, with a lease on cores and main memory."""
        with self.workers.hold_cores(leasing) as lease_and_ticket:
            try:
                return self.once(*lease_and_ticket or (None, None))
            finally:
                leasing.learn_memory(self.memory_bytes, is_done=not self.was_killed)

    def _runs_here(self) -> bool:
        # A second try does not free the memory of this process.
        return not self.method.is_own_process

    def _may_use_cpu(self) -> bool:
        gpu = self.settings.gpu
        return gpu.on_oom == "cpu" and gpu.policy.gpu != "require" and not self._runs_here()

    def _failed(self, text: str, tries: int, more: str) -> GPUOutOfMemoryError:
        gpu = self.settings.gpu
        cpu = (
            ", or allow the CPU (on_oom='cpu')" if gpu.on_oom != "cpu" and gpu.policy.gpu != "require" else ""
        )
        return GPUOutOfMemoryError(
            f"{text}{f' in {tries} tries' if tries > 1 else ''}. {more}. Use smaller batches, ask for more "
            f"(gpu_memory=, num_gpus=){cpu}"
        )

    def _on_lease(self, lease: Lease, ticket: Ticket) -> Any:
        try:
            return self.once(lease, ticket)
        finally:
            if "no_cuda" in self.events:
                notices.say_why_no_cuda(lease, self.events["no_cuda"])
            if "lacks" in self.events:
                notices.say_once(str(self.events["lacks"]["text"]))

    def once(self, lease: Lease | None, ticket: Ticket | None = None) -> Any:
        """Return the result of the call in one worker, which keeps the lock of the ticket.

        ``lease``: lease of the worker. Without a ticket, it is the lease of this process, if it is a worker.
        """
        with nullcontext() if ticket is None else files.passed_on(ticket.descriptor):
            try:
                return self._run_worker(lease, ticket)
            except start.ForkInsteadError:
                self.by_name = False
            return self._run_worker(lease, ticket)

    def _run_worker(self, lease: Lease | None, ticket: Ticket | None) -> Any:
        settings, workers = self.settings.worker, self.workers
        self.method = method = self._chosen()
        terms = Terms(self.settings, method, self.environ, lease, ticket is None, workers.takes_over)
        terms = grants.adjusted(terms)
        env = grants.environment(terms)
        record = {**self.fields, "start_method": method.name, **grants.describe(terms, env)}
        if self.settings.client_overrides:
            record["own"] = dict(self.settings.client_overrides)
        is_of_server = self.fields["client"] == SERVER
        display = ProgressDisplay(self.label, record, workers.shows_progress, ends_once=is_of_server)
        # A worker with a GPU reports its memory itself, unless it may not write into the ticket.
        reports = terms.gpu_lease is None or settings.confinement is not None
        report = WorkerReport(record, display, ticket, terms.lease, reports, self.clients)
        self.events = report.events

        # This function must not refer to self: it is freed later than the arguments should be.
        def on_start(pid: int, used: str) -> None:
            report.on_start(pid, used, is_process=method.is_own_process, is_used_again=workers.is_used_again)

        call = Call(
            self.task,
            self.args,
            self.kwargs,
            env=env,
            setup=grants.SETUP,
            label=self.label,
            preload=settings.preload,
            lease_descriptor=-1 if ticket is None else ticket.descriptor,
            log_prefix=_log_prefix(self.fields),
            confinement=settings.confinement,
            takes_over=workers.takes_over,
        )
        error: BaseException | None = None
        try:
            with display, _around(method, env):
                return workers.run(
                    call,
                    method,
                    timeout_s=settings.timeout_s,
                    on_event=report.on_event,
                    on_look=report.on_look,
                    on_start=on_start,
                    otherwise=self._otherwise(method),
                )
        except start.ForkInsteadError:
            raise
        except BaseException as caught:
            error = caught
            raise
        finally:
            report.write_end(error, is_cancelled=workers.is_cancelled)
            self.memory_bytes = report.memory_bytes if workers.learns_memory else 0
            self.was_killed = isinstance(error, WorkerDiedError)

    def _chosen(self) -> StartMethod:
        settings = self.settings.worker
        server_first = self.by_name or bool(settings.preload)
        method = self.workers.choose(settings.start_method, server_first=server_first)
        if settings.confinement is not None and method.copies_caller:
            return start.SPAWN  # a copy of this process has memory that a confined worker must not see
        return method

    def _otherwise(self, method: StartMethod) -> StartMethod | None:
        """Return the start method if no fork server can run, or None if this is an error."""
        settings = self.settings.worker
        is_free = settings.confinement is None and not settings.preload
        # Arguments such as a lock need a copy of this process.
        if is_free and method != self.workers.choose(settings.start_method):
            return start.FORK
        return start.SPAWN if settings.start_method == "auto" else None


def _around(method: StartMethod, env: Mapping[str, str]) -> AbstractContextManager[None]:
    """Return a context for a call, in which the threads of this process suit the worker's environment."""
    if not method.is_own_process:
        return threads.restored()
    return threads.prepared(own_process.environment(env)) if method.copies_caller else nullcontext()


def _log_prefix(fields: Mapping[str, Any]) -> str:
    """Return the prefix of a worker's log lines: client and round."""
    client, server_round = fields["client"], fields["round"]
    if client == SERVER and is_worker():
        # This is a worker of a worker, whose prefix names the client.
        return events.log_prefix()
    # A name with line breaks would break the line of a record.
    name = client if client.isprintable() else repr(client)
    source = "server" if client == SERVER else f"client {name}"
    return f"{source}: " if server_round is None else f"{source}, round {server_round}: "
