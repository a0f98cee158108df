"""The worker's side: environment first, then the task, then out.

One entry for every start method: `serve`.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import multiprocessing
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from flower_gpu.errors import WorkerStartError
from flower_gpu.frameworks import set_by_modules
from flower_gpu.workers import (
    caller_settings,  # noqa: F401 - requests have objects of it, and a fork server must have it already
    confined_replies,
    confinement,
    events,
    interpreter,
    messages,
    state_folder,
    threads,
    transport,
)
from flower_gpu.workers.call import Preload, Task, load_task, run_preload, set_up
from flower_gpu.workers.call_end import Outcome, failure, place_of, unsendable
from flower_gpu.workers.life import be_killed_first, die_with_the_caller
from flower_gpu.workers.main_memory import MainMemory
from flower_gpu.workers.own_process import facts

_SIGNALS = signal.valid_signals()
_STACK_DUMP_SIGNAL = signal.SIGQUIT  # what a terminal's Ctrl-\ sends: "show where you are"
_IDLE_S = 0.2  # without a call: the next one comes with the next round, or never


@dataclass(frozen=True)
class Ends:
    """A worker's ends of the lines to its caller, as descriptors."""

    life: int  # read end of a pipe that only the caller writes to: closed when the caller is gone
    calls: int  # a socket: calls come from it, and what they tell goes to it
    stdout: int = -1  # what it writes its output to; -1: it was started with that
    stderr: int = -1

    def all(self) -> set[int]:
        """Return those that there are."""
        return {number for number in vars(self).values() if number >= 0}


@dataclass(frozen=True)
class Origin:
    """What a worker has from the process that started it."""

    env: Mapping[str, str]  # environment variables of all its calls
    # The first call's request, as :func:`flower_gpu.workers.methods.fork` makes it; None: it comes with the
    # call.
    request: tuple[Any, ...] | None = None
    # Returns the environment variables that the task's module has set after libraries had read them; then the
    # caller is told, and the task is not run.
    set_too_late: Callable[[], Mapping[str, str | None]] = dict
    # Returns what this worker had to import by now, for the caller.
    imported: Callable[[], list[str]] | None = None


def spawned() -> NoReturn:
    """Run as the program of a fresh interpreter; the start record is the first argument."""
    record = json.loads(sys.argv.pop(1))
    ends = Ends(**record["ends"])
    for descriptor in (ends.life, ends.calls):
        os.set_inheritable(descriptor, False)  # not for programs that the task starts
    serve(ends, Origin({name: os.environ[name] for name in record["env"]}))
    leave()


def leave() -> NoReturn:
    """Exit as a program does."""
    interpreter.end()
    os._exit(0)


def fork_process(
    target: Callable[[], None],
    name: str,
    *,
    own_session: bool = False,
    go_on: Callable[[Callable[[], NoReturn]], NoReturn] = lambda child: child(),
) -> int:
    """Fork this process; the child leads a group of its own, runs ``target`` and exits.

    ``own_session``: so that nothing of it can join the group of another worker.
    ``go_on``: receives, in the child, what that has to do.
    """
    # In the worker multiprocessing must know that it is in a child, not daemonic and without children:
    # DataLoader builds on it. Its own start() is not used: other threads' calls of it reap each other's
    # children, which frees a pid before the group is ended, and a failed one leaves descriptors open.
    process = multiprocessing.Process(target=target, name=name, daemon=False)
    # The handlers of this process would act in its name in the child (Flower's report the task as stopped).
    # Looked up here: in a fork each object that is touched is a page to be copied.
    handled = [number for number in _SIGNALS if callable(signal.getsignal(number))]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _leave_group_of_caller(handled, own_session)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            go_on(partial(_run, process))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if not own_session:  # which the leader of a group cannot have any more
        with suppress(OSError):  # so that the group exists before anybody tries to end it
            os.setpgid(pid, pid)
    return pid


def _run(process: multiprocessing.Process) -> NoReturn:
    code = 1
    try:
        code = process._bootstrap()  # type: ignore[attr-defined]
    finally:
        os._exit(code & 0xFF)


def _leave_group_of_caller(handled: Iterable[int], own_session: bool) -> None:
    """Stop, right after a fork, to receive and to handle signals as the caller does."""
    if own_session:
        os.setsid()
    with suppress(OSError):  # the caller does the same, maybe earlier
        os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in handled:
        signal.signal(number, signal.SIG_DFL)


def forget_exit_functions() -> None:
    """Unregister the libraries' exit functions in a process whose forks are workers.

    That is for a program; torch's finalizers alone take 30 ms.
    """
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)


def forked(ends: Ends, origin: Origin) -> None:
    """Serve in a fork, where locks and streams are those of the process that was forked."""
    os.dup2(ends.stderr, 2)  # first: what fails from here on is told there
    os.dup2(ends.stdout, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for descriptor in {ends.stdout, ends.stderr, nothing} - {0, 1, 2}:
        os.close(descriptor)
    # The caller's sys.stdout may be anything (a notebook's, a test runner's).
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if "tqdm.std" in sys.modules:
        # Its lock is one for the whole family of processes: a worker that is killed with it, or that
        # waits for the caller to read its output, would stop the caller's bars for ever.
        sys.modules["tqdm.std"].tqdm.set_lock(threading.RLock())
    serve(ends, origin)


def serve(ends: Ends, origin: Origin) -> None:
    """Do the calls that come on the line, until one of them was the last, or the caller closes it."""
    die_with_the_caller(ends.life)
    be_killed_first()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ended from outside: no traceback for that
    faulthandler.enable(file=2)
    faulthandler.register(_STACK_DUMP_SIGNAL, file=2, all_threads=True)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the task must see how its own children end
    for stream in (sys.stdout, sys.stderr):  # the caller reads UTF-8, whatever the locale is
        stream.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
    os.environ.update(origin.env)
    # A task may fork: a DataLoader does, and multiprocessing does so by default on Linux up to Python 3.13. A
    # fork of a process whose OpenMP threads have started would wait for them for ever.
    os.register_at_fork(before=threads.release_openmp_threads)
    state_folder.take_socket_folder()
    line = socket.socket(fileno=ends.calls)
    _Calls(line, origin).do()
    # Not after an error such as sys.exit(): then the end of this process is what the caller has to see first.
    with suppress(OSError):  # the task has closed all descriptors
        line.close()


class _Calls:
    """The calls of one worker, done one after the other."""

    def __init__(self, line: socket.socket, origin: Origin) -> None:
        self._line = line
        self._origin = origin
        self._is_first = True
        self._base = MainMemory.of_process("self")  # of the process that this one is a fork of

    def do(self) -> None:
        """Do them."""
        waiting = select.poll()
        waiting.register(self._line, select.POLLIN)
        stays = True
        while stays:
            if not waiting.poll(_IDLE_S * 1000):
                facts.be_idle()
            try:
                message, files = messages.receive(self._line)
            except messages.Gone:  # there are no more
                return
            if not self._is_first:  # else the caller knows that this process is new
                self._send({"event": "begun"})
            stays = self._do(message, dict(zip(message["files"], files, strict=True)))
            self._is_first = False

    def _send(self, event: Mapping[str, Any]) -> None:
        # Without a lock: each message is sent as a whole, and a child of the task's could find it taken.
        with suppress(messages.Gone):  # the task has closed all descriptors
            messages.send(self._line, event)

    def _do(self, message: Mapping[str, Any], files: dict[str, int]) -> bool:
        """Do one call; tell whether another one may come."""
        facts.may_stay = message["stays"]
        facts.keep(files.get("held", -1))
        if not self._is_first:  # what an earlier task has changed
            os.environ.update({**self._origin.env, **message["env"]})
        outcome = self._run(message, files)
        if outcome is None:
            return False
        leave_reply(outcome, files["reply"])
        # After an error much may be different from what the next task expects to find.
        stays = facts.may_stay and not facts.has_to_leave and outcome.error_type is None
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # the task has closed or replaced it
                stays = False
        for name in files.keys() & {"request", "reply"}:
            os.close(files[name])
        event: dict[str, Any] = {"event": "result", "stays": stays, "cpu_s": outcome.cpu_s}
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if self._is_first and not stays:  # else nobody knows what of it is this task's
            event["memory_bytes"] = max(0, peak_bytes - self._base.resident_bytes)
            event["mapped_bytes"] = max(0, MainMemory.of_process("self").file_bytes - self._base.file_bytes)
        messages.send(self._line, {**event, "peak_bytes": peak_bytes})
        return stays

    def _run(self, message: Mapping[str, Any], files: Mapping[str, int]) -> Outcome | None:
        """Load the task and its arguments, and run it.

        Returns None where it was not run: the caller was told why, and tries again.
        """
        origin, send = self._origin, self._send
        with events.SeenImports(send, origin.imported), events.sending_to(send, all_threads=True):
            try:
                with set_up(message["setup"]):
                    *request, settings, main = self._request(files)
                    main.install()
                    with nullcontext() if settings is None else settings.applied():
                        return self._run_request(*request)
            except SystemExit as error:  # the task asked for it
                send({"event": "sys_exit", "where": place_of(error)})
                raise
            except BaseException as error:
                return failure(error)

    def _run_request(
        self,
        task: Task,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        functions: Preload,
        log_prefix: str,
    ) -> Outcome | None:
        events.begin_log_lines(log_prefix)
        run_preload(functions)
        function = load_task(task)
        threads.follow(self._origin.env)
        _check_environment(self._origin.env)
        # Later calls find what the first one has set, with which the libraries have done well.
        if self._is_first and (variables := self._origin.set_too_late()):
            self._send({"event": "set_too_late", "variables": variables})
            return None
        self._send({"event": "task_started"})
        began_s = time.process_time()
        value = function(*args, **kwargs)
        cpu_s = time.process_time() - began_s
        return Outcome(value=value, cpu_s=cpu_s)

    def _request(self, files: Mapping[str, int]) -> tuple[Any, ...]:
        """Return the parts of a request, as :func:`flower_gpu.workers.methods.write_request` writes them."""
        if "request" not in files:
            assert self._origin.request is not None
            return self._origin.request
        request: tuple[Any, ...] = transport.read_request(files["request"], files.get("shared", -1))
        return request


def leave_reply(outcome: Outcome, descriptor: int) -> None:
    """Write an outcome into the memory file for the caller."""
    # A confinement that was wanted and could not be had counts as well: the caller expects it.
    is_confined = confinement.is_wanted(os.environ)
    write = confined_replies.write_reply if is_confined else transport.write_reply
    try:
        write(outcome, descriptor)
    except Exception as error:
        os.ftruncate(descriptor, 0)
        write(unsendable(error), descriptor)


def _check_environment(env: Mapping[str, str]) -> None:
    # A module's own number of threads wins, as it does where it is the only one.
    free = {"OMP_NUM_THREADS", *set_by_modules()}
    for name, value in env.items():
        found = os.environ.get(name)
        if found == value or name in free:
            continue
        # Without the values, which may be secret: the text goes into logs, the trace and the reply.
        change = "removed" if found is None else "set to another value"
        raise WorkerStartError(
            f"the worker's environment was changed while the task was loaded: {name} was {change}. Set it "
            "through env= and not in the task's module"
        )
