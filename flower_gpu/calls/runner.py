"""The one place where a call is put together: its settings, the GPUs it may use, its lease, its tries."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from flower_gpu.calls import environment, leasing
from flower_gpu.calls.leasing import Leasing
from flower_gpu.calls.settings import CallSettings, split
from flower_gpu.calls.tries import SERVER, Tries, Workers
from flower_gpu.errors import ConfigError
from flower_gpu.leases.footprint_rule import ShapedArray, key_of
from flower_gpu.leases.lease import Lease
from flower_gpu.leases.request import LeaseRequest
from flower_gpu.leases.tickets import Ticket
from flower_gpu.options import (
    DEADLINE_VARIABLE,
    RANKS_VARIABLE,
    START_METHOD_VARIABLE,
    OnOomWord,
    PolicyWord,
    StartMethodWord,
)
from flower_gpu.workers import call_end, events, threads
from flower_gpu.workers import caller as worker
from flower_gpu.workers import methods as start
from flower_gpu.workers.call import Call, Task, task_name
from flower_gpu.workers.methods import StartMethod

#: Name of calls that no client makes: server-side evaluation, initial weights.
SERVER = "server"


class Workers:
    """Where a call gets its worker and its lease from. Here each call has its own of both."""

    shows_progress = True  # whether the progress of a call is drawn
    is_used_again = False  # whether the call's worker has run others before
    learns_memory = True  # whether later calls ask for the main memory that a call was seen to take

    @property
    def is_cancelled(self) -> bool:
        """Whether the call is given up: then its worker is ended, and has not failed."""
        return False

    def choose(self, start_method: str, *, server_first: bool = False) -> StartMethod:
        """Choose a start method, as :func:`flower_gpu.workers.methods.choose` does."""
        return start.choose(start_method, server_first=server_first)

    def run(self, call: Call, method: StartMethod, **options: Any) -> Any:
        """Run a call in a worker, as :func:`flower_gpu.workers.caller.run` does."""
        return worker.run(call, method, **options)

    def held(self, leasing_: Leasing, request: LeaseRequest) -> AbstractContextManager[tuple[Lease, Ticket]]:
        """Hold a lease, as :meth:`flower_gpu.calls.leasing.Leasing.held` does."""
        return leasing_.held(request)

    def held_on_cpu(self, leasing_: Leasing) -> AbstractContextManager[tuple[Lease, Ticket] | None]:
        """Hold cores and main memory, as :meth:`flower_gpu.calls.leasing.Leasing.held_on_cpu` does."""
        return leasing_.held_on_cpu()


#: What a worker tells of how far it is, and the name of its time in the trace.
_TIMES = MappingProxyType({"task_started": "task_at", "worker_result": "result_at"})


def run_call(
    task: Task,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    settings: CallSettings,
    kind: str,
    name: str | None = None,
    arrays: Sequence[ShapedArray] = (),
    config: Mapping[str, Any] | None = None,
    server_round: int | None = None,
    workers: Workers | None = None,
    by_name: bool = False,
) -> Any:
    """Run one call of one client in its own worker, on a GPU as far as node and server want that.

    ``by_name``: whether of the user's function only the name is given, so that its worker needs nothing of
    this process.

    Raises
    ------
    GPUError
        If there is no GPU that the node requires, or no lease in time.
    GPUOutOfMemoryError
        If there was not enough memory, however it was tried.
    WorkerError
        If the worker could not be started, died, or took too long.
    """
    client = settings.worker.name or SERVER
    label = f"{kind} on the server" if client == SERVER else f"{kind} of client {client}"
    if server_round is None:
        server_round = _round_in(config or {})
    workers = workers or Workers()
    fields = {"call": os.urandom(6).hex(), "client": client, "task": kind, "round": server_round}
    call = Tries(task, args, kwargs or {}, settings, label, fields, workers, by_name)
    # No copy: to read all of the environment takes longer than much else of a short call.
    environ = ChainMap(dict(settings.worker.env), environment.without_ray(os.environ))
    if leasing.is_worker():  # a worker that starts another one: both share its lease, or have none
        return call.once(environment.of_worker(leasing.of_this_process(), environ))
    # What cannot be is refused before a lease is waited for.
    call.workers.choose(settings.worker.start_method)
    _check_confined(settings)
    settings.host.check()
    decision = leasing.decide(settings.gpu, settings.gpu.requested(config or {}), environ)
    sizes = {**settings.gpu.run_config, **(config or {})}
    key = key_of(f"{name or task_name(task)} {kind}", arrays, sizes)
    uuids = decision.uuids if decision.on_gpu else ()
    leases = Leasing(settings.gpu, uuids, label, key, call.fields, settings.host)
    return call.on_gpu(leases, environ) if uuids else call.on_cpu(leases, environ)


@dataclass
class _Run:
    """One call, tried once or several times."""

    task: Task
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    settings: CallSettings
    label: str
    fields: Mapping[str, Any]
    workers: Workers
    by_name: bool  # and a fork server can have it, as far as is known
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    method: StartMethod = start.SPAWN  # by which it was tried last
    memory_bytes: int = 0  # that the last worker took, as far as it has told

    def on_gpu(self, leasing_: Leasing, environ: Mapping[str, str]) -> Any:
        """Run it under a lease; again under another one where it ran out of memory."""
        requests = [leasing_.settings.request]
        text, ran_out = "", None
        while True:
            with ExitStack() as held_by:
                try:
                    held, ticket = held_by.enter_context(self.workers.held(leasing_, requests[-1]))
                except LeaseTimeoutError as late:
                    if ran_out is None:
                        raise
                    if not self._may_use_cpu():
                        raise self._failed(text, len(requests) - 1, f"Then {late}") from ran_out
                    leasing.say(f"{text}. Then {late}\nIt runs on the CPU")
                    break
                is_done = False
                try:
                    value = self._under(held, ticket, environ)
                    is_done = True
                    return value
                except Exception as error:
                    out = self.told.get("out_of_memory")
                    if out is None and says_device_is_busy(error):
                        raise leasing.refused(self.label, held) from error
                    if out is None:
                        raise
                    leasing_.learn_at_least(out, held)
                    text = f"{self.label}: {out_of_memory.describe(out, held)}"
                    others = leasing.who_else(held, out["uuid"])
                    following = None
                    if not self._runs_here():
                        following = out_of_memory.next_request(out, held, requests, self.settings.gpu.on_oom)
                    then = "again" if following else "on the CPU" if self._may_use_cpu() else "failed"
                    trace.write("out_of_memory", **self.fields, lease=held.id, **out, then=then)
                    if then == "failed":
                        raise self._failed(text, len(requests), f"Also there: {others}") from error
                    # Without its frames: they have the arguments, and this one has it.
                    ran_out = error.with_traceback(None)
                finally:
                    if figures := self.told.get("gpu_memory"):
                        leasing_.learn(figures, held, is_done=is_done)
                    leasing_.learn_memory(self.memory_bytes)
            leasing.say(f"{text}. Also there: {others}. It runs {then}")
            if following is None:
                break
            requests.append(following)
        return self.on_cpu(replace(leasing_, uuids=()), environ)

    def on_cpu(self, leasing_: Leasing, environ: Mapping[str, str]) -> Any:
        """Run it without a GPU, with what it gets of cores and main memory."""
        without_gpu = environment.of_worker(None, environ)
        with self.workers.held_on_cpu(leasing_) as found:
            try:
                if found is None:
                    return self.once(without_gpu)
                held, ticket = found
                with files.passed_on(ticket.descriptor):
                    return self.once(without_gpu, ticket, held)
            finally:
                leasing_.learn_memory(self.memory_bytes)

    def _runs_here(self) -> bool:
        return not self.method.is_own_process  # whose memory no second try gives back

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

    def _under(self, held: Lease, ticket: Ticket, environ: Mapping[str, str]) -> Any:
        try:
            with files.passed_on(ticket.descriptor):
                return self.once(environment.of_worker(held, environ), ticket, held)
        finally:
            if "no_cuda" in self.told:
                leasing.say_why_no_cuda(held, self.told["no_cuda"])
            if "lacks" in self.told:
                leasing.say_once(str(self.told["lacks"]["text"]))

    def once(
        self, gpu_env: Mapping[str, str], ticket: Ticket | None = None, held: Lease | None = None
    ) -> Any:
        """Run it in one worker, which keeps the lock of a ticket, where it has one."""
        settings = self.settings.worker
        server_first = self.by_name or bool(settings.preload)
        method = self.workers.choose(settings.start_method, server_first=server_first)
        confinement = settings.confinement
        if confinement is not None and method.copies_caller:  # this process has what the worker must not have
            method = start.SPAWN
        # A copy of this process can have what no other process can: a lock in the arguments, say.
        or_fork = (
            confinement is None
            and not settings.preload
            and method != self.workers.choose(settings.start_method)
        )
        if (
            not method.is_own_process
            and held is not None
            and held.shares
            and leasing.is_on_devices_in_use(held) is False
        ):
            leasing.say_once(
                f"{self.label}: start_method='in-process' runs it on the GPU with which CUDA has "
                f"started here, and not on its lease's, GPU {held.shares[0].index} ({held.shares[0].uuid}). "
                "Use 'auto' or 'spawn', or set CUDA_VISIBLE_DEVICES to one GPU before CUDA starts"
            )
        self.method = method
        if reason := guard.why_none(gpu_env, has_worker=method.is_own_process):
            leasing.say_once(f"{self.label}: no GPU guard: {reason}", logging.INFO)
        count = threads.of_worker(settings.threads, settings.env, copies_caller=method.copies_caller)
        env = {**threads.environment(count, settings.env), **gpu_env}
        around: AbstractContextManager[None] = nullcontext()
        if method.is_own_process and method.copies_caller:
            around = threads.prepared({**os.environ, **env})
        elif not method.is_own_process:
            around = threads.restored()
        record: dict[str, Any] = {**self.fields, "start_method": method.name, "threads": count}
        num_gpus = self.settings.gpu.request.count
        if num_gpus > 1 and method.is_own_process:
            env.update(_for_ranks(settings, num_gpus))
        env.update(confined_calls.environment(confinement))
        if held is not None:
            record["lease" if held.shares else "cores_lease"] = held.id
        # Not self in the functions below: who calls them is freed later than the arguments should be.
        self.told = told = {}
        workers = self.workers
        times: dict[str, float | None] = dict.fromkeys((*_TIMES.values(), "cpu_s", "memory_bytes"))

        bases: dict[int, int] = {}  # main memory that workers had when they started

        def on_start(pid: int, used: str) -> None:
            record.update(pid=pid, start_method=used)
            if workers.is_used_again:
                record["used_again"] = True
            if ticket is not None and method.is_own_process:
                bases[pid] = host.anonymous_bytes(pid)
                ticket.report_worker(pid, bases[pid])
            trace.write("worker_started", **record)

        def on_event(event: dict[str, Any]) -> None:
            kind = str(event.get("event"))
            if kind in ("gpu_memory", "lacks", "out_of_memory", "no_cuda"):
                told[kind] = {key: event[key] for key in event if key != "event"}
            elif kind == "gpu_used" and ticket is not None:  # of a confined worker
                pid = record["pid"]
                ticket.report_worker(
                    pid, bases.get(pid, 0), confined_calls.used_of_lease(event["used"], held)
                )
            elif kind in _TIMES:
                times[_TIMES[kind]] = time.time()
                times.update({name: event[name] for name in times if name in event})
                if not event.get("stays"):  # else the call is over: the line of its end has all of it
                    trace.write(kind, call=record["call"], pid=record.get("pid"), client=record["client"])
            else:
                display.on_event(event)

        call = Call(
            self.task,
            self.args,
            self.kwargs,
            env=env,
            setup=leased_worker.SETUP,
            label=self.label,
            preload=settings.preload,
            # A confined worker must not have the lock of its lease: it could give it up, and use the GPU on.
            held=-1 if ticket is None or confinement is not None else ticket.descriptor,
            log_prefix=_log_prefix(self.fields),
            confinement=confinement,
        )
        began = time.monotonic()
        error: BaseException | None = None
        try:
            with ProgressDisplay(self.label, record, self.workers.shows_progress) as display, around:
                return workers.run(
                    call,
                    method,
                    timeout_s=settings.timeout_s,
                    on_event=on_event,
                    on_start=on_start,
                    or_spawn=settings.start_method == "auto",
                    or_fork=or_fork,
                )
        except start.ForkInsteadError:
            self.by_name = False
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.memory_bytes = int(times["memory_bytes"] or 0) if workers.learns_memory else 0
            if "pid" in record:
                if "gpu_memory" in told:
                    record["gpus"] = told["gpu_memory"]["gpus"]
                trace.write(
                    "worker_finished",
                    **record,
                    **times,
                    seconds=round(time.monotonic() - began, 4),
                    outcome="cancelled" if error and workers.is_cancelled else _outcome(error, told),
                    error=None if error is None else text_of(error),
                    **_traceback(error),
                )
        return self.once(gpu_env, ticket, held)


def _for_ranks(settings: WorkerSettings, num_gpus: int) -> dict[str, str]:
    """Return what a worker has to know that starts a worker for each of several GPUs."""
    env = {RANKS_VARIABLE: str(num_gpus)}
    if settings.start_method != "auto":
        env[START_METHOD_VARIABLE] = settings.start_method
    if settings.timeout_s is not None:
        env[DEADLINE_VARIABLE] = str(time.monotonic() + settings.timeout_s)
    return env


def run_in_worker(
    task: Task,
    *args: Any,
    start_method: StartMethodWord | None = None,
    gpu: PolicyWord | None = None,
    on_oom: OnOomWord | None = None,
    **kwargs: Any,
) -> Any:
    """Run any function in a worker process, for example to build the initial weights on the server.

    Parameters
    ----------
    task : callable or str
        The function, or ``"package.module:function"``: then only the worker imports that module.
    *args
        Arguments of the function: numpy arrays, plain values, or anything cloudpickle takes.
    start_method, gpu, on_oom, **kwargs
        Its keyword arguments, and those of :class:`flower_gpu.CallOptions`, which are not passed on.

    Returns
    -------
    object
        What the function returned.

    Raises
    ------
    WorkerError
        If the worker could not be started, died, or took too long.
    GPUError
        If it needs a GPU and there is none for it.
    Exception
        What the function raised, with the worker's traceback as its cause.

    Examples
    --------
    >>> weights = run_in_worker("task:initial_weights", seed=42)
    """
    options, rest = split(kwargs, start_method=start_method, gpu=gpu, on_oom=on_oom)
    arrays = [
        value for value in (*args, *rest.values()) if hasattr(value, "shape") and hasattr(value, "dtype")
    ]
    settings = CallSettings.resolve(options)
    return run_call(
        task,
        args,
        rest,
        settings=settings,
        kind=task_name(task),
        arrays=arrays,
        by_name=isinstance(task, str),
    )


def _check_confined(settings: CallSettings) -> None:
    """Refuse what a confined worker cannot have.

    Raises ConfigError if so.
    """
    if settings.worker.confinement is None:
        return
    if settings.gpu.request.count > 1:
        raise ConfigError(
            "--confine: a call gets one GPU at most, since the ranks of several talk to each other by TCP. "
            "Ask for one (num-gpus=1), or run apps that need several without --confine"
        )
    method = settings.worker.start_method
    if method not in ("auto", methods.FORKSERVER.name, methods.SPAWN.name):
        raise ConfigError(
            f"--confine: start_method={method!r} gives workers what their caller has. Leave it out, or use "
            "'forkserver' or 'spawn'"
        )


def _round_in(config: Mapping[str, Any]) -> int | None:
    """Return the round that a server names in its config: Flower's own key, or the one of its examples."""
    for key in ("server-round", "server_round"):
        if type(config.get(key)) is int:
            return int(config[key])
    return None


def _traceback(error: BaseException | None) -> dict[str, str]:
    text = "" if error is None else call_end.traceback_of(error)
    return {"traceback": text} if text else {}


def _outcome(error: BaseException | None, told: Mapping[str, Any]) -> str:
    if error is None:
        return "ok"
    if isinstance(error, WorkerTimeoutError):
        return "timeout"
    if isinstance(error, WorkerDiedError):
        return "died"
    if "out_of_memory" in told:
        return "out of memory"
    return "error" if isinstance(error, Exception) else "cancelled"
