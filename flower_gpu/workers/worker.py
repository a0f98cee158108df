"""The worker's side: set up the process, do the calls, exit.

Every start method leads to :func:`serve`. A fresh interpreter comes from :func:`spawned`. A fork comes from
:func:`fork_process` and :func:`forked`, whether the caller or a fork server was forked.

The order within a worker matters:

1. :func:`die_with_the_caller` comes first. From then on the kernel kills the worker's process group when the
   caller ends, for any reason. The worker runs no code for that.
2. SIGINT gets its default action, because the caller ends the worker. SIGQUIT writes the stacks of all
   threads, so that a caller can show where a hung worker was.
3. Environment variables are set before the task's module is imported, because libraries read them only once.
   They are checked again after the import (``_check_environment``).
4. :class:`_Calls` reads one call after the other from the socket and runs it. Each result goes into a memory
   file that the caller has made. A ``result`` report tells the caller that the file is complete, and whether
   the worker can do another call.

A fork copies the threads' locks and the signal handlers of its parent, but none of its threads:

- Signals are blocked during the fork, until the child has left the caller's process group and dropped the
  caller's handlers. Otherwise a signal could run the caller's handler in the child.
- Both sides call ``setpgid``, so the group exists whichever runs first. The caller could not end it
  otherwise.
- tqdm's lock is replaced, because a killed worker could hold it forever.

The worker takes no lock to send a report. A child that the task forks could find such a lock taken by a
thread that does not exist in the child. The kernel sends each message as a whole.
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
_STACK_DUMP_SIGNAL = signal.SIGQUIT  # a terminal sends it for Ctrl-\
# Seconds without a call until the worker counts as idle. The next call then comes with the next round, if
# any.
_IDLE_S = 0.2


@dataclass(frozen=True)
class Ends:
    """The worker's ends of its connections to the caller, as descriptors."""

    life: int  # read end of the life pipe, whose write end closes when the caller ends
    calls: int  # socket that brings calls and takes reports
    stdout: int = -1  # pipe for standard output, -1 if the worker was started with it
    stderr: int = -1  # pipe for standard error, likewise

    def all(self) -> set[int]:
        """Return the descriptors that are open."""
        return {number for number in vars(self).values() if number >= 0}


@dataclass(frozen=True)
class Origin:
    """Facts that a worker gets from the process that started it."""

    env: Mapping[str, str]  # environment variables of all calls of the worker
    # Request of the first call, made by :func:`flower_gpu.workers.methods.fork`; None if it comes with the
    # call.
    request: tuple[Any, ...] | None = None
    # Returns the environment variables that the task's module set after libraries had read them. If there are
    # any, the caller is told, and the task does not run.
    set_too_late: Callable[[], Mapping[str, str | None]] = dict
    # Returns the modules that this worker has imported so far, for the caller.
    imported: Callable[[], list[str]] | None = None


def spawned() -> NoReturn:
    """Run as the program of a fresh interpreter. The first argument is the start record in JSON."""
    record = json.loads(sys.argv.pop(1))
    ends = Ends(**record["ends"])
    # Programs that the task starts must not inherit these descriptors.
    for descriptor in (ends.life, ends.calls):
        os.set_inheritable(descriptor, False)
    serve(ends, Origin({name: os.environ[name] for name in record["env"]}))
    leave()


def leave() -> NoReturn:
    """Exit after running the exit functions of a program."""
    interpreter.end()
    os._exit(0)


def fork_process(
    target: Callable[[], None],
    name: str,
    *,
    own_session: bool = False,
    go_on: Callable[[Callable[[], NoReturn]], NoReturn] = lambda child: child(),
) -> int:
    """Fork this process and return the child's pid. The child leads its own group, runs ``target`` and exits.

    ``own_session``: True puts the child into a session of its own, so that its processes cannot join the
    process group of another worker.
    ``go_on``: called in the child with the function that runs ``target`` and exits.
    """
    # DataLoader needs multiprocessing to know that the worker is a child, not daemonic and without children
    # of its own. But Process.start() is not used. It reaps children that other threads have started, which
    # frees a pid before its group is ended. And if it fails, it leaves descriptors open.
    process = multiprocessing.Process(target=target, name=name, daemon=False)
    # The child has to drop the signal handlers of this process. For example, Flower's handlers would report
    # the task as stopped. These handlers are looked up before the fork, because each object that the child
    # touches costs a copied page.
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
    # The child calls setpgid as well. The call here makes sure that the group exists before the caller can
    # end it. It is skipped for a child with its own session, because the leader of a group cannot start a
    # session.
    if not own_session:
        with suppress(OSError):
            os.setpgid(pid, pid)
    return pid


def _run(process: multiprocessing.Process) -> NoReturn:
    code = 1
    try:
        code = process._bootstrap()  # type: ignore[attr-defined]
    finally:
        os._exit(code & 0xFF)


def _leave_group_of_caller(handled: Iterable[int], own_session: bool) -> None:
    """Leave the caller's process group and drop its signal handlers, right after a fork."""
    if own_session:
        os.setsid()
    with suppress(OSError):  # the caller may have done this already
        os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in handled:
        signal.signal(number, signal.SIG_DFL)


def forget_exit_functions() -> None:
    """Unregister the exit functions of libraries in a fork server, so that its workers exit faster.

    These functions are meant for programs. Torch's finalizers alone take 30 ms.
    """
    atexit._clear()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)


def forked(ends: Ends, origin: Origin) -> None:
    """Serve in a fork, after replacing the streams and locks that it inherited."""
    # Standard error comes first, because it takes the messages of later failures.
    os.dup2(ends.stderr, 2)
    os.dup2(ends.stdout, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for descriptor in {ends.stdout, ends.stderr, nothing} - {0, 1, 2}:
        os.close(descriptor)
    # The caller's sys.stdout may be anything (a notebook's, a test runner's).
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if "tqdm.std" in sys.modules:
        # All processes of the family share this lock. If a worker is killed while it holds the lock, or waits
        # for the caller to read its output, the caller's bars would stop forever.
        sys.modules["tqdm.std"].tqdm.set_lock(threading.RLock())
    serve(ends, origin)


def serve(ends: Ends, origin: Origin) -> None:
    """Do the calls that arrive on the socket, until the last call is done or the caller closes the socket."""
    die_with_the_caller(ends.life)
    be_killed_first()
    # The caller ends its workers after a Ctrl-C, so a traceback from each worker would only be noise.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    faulthandler.enable(file=2)
    faulthandler.register(_STACK_DUMP_SIGNAL, file=2, all_threads=True)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the task must get the exit status of its children
    for stream in (sys.stdout, sys.stderr):  # the caller reads UTF-8 in every locale
        stream.reconfigure(  # type: ignore[union-attr]
            encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
    os.environ.update(origin.env)
    # A task may fork: a DataLoader does, and multiprocessing does so by default on Linux up to Python 3.13.
    # If OpenMP threads were running before such a fork, the child would wait for them forever.
    os.register_at_fork(before=threads.release_openmp_threads)
    state_folder.take_socket_folder()
    line = socket.socket(fileno=ends.calls)
    _Calls(line, origin).do()
    # The socket stays open after an error such as sys.exit(), so that the caller sees the exit first.
    with suppress(OSError):  # the task has closed all descriptors
        line.close()


class _Calls:
    """The calls of one worker, which run one after the other."""

    def __init__(self, line: socket.socket, origin: Origin) -> None:
        self._line = line
        self._origin = origin
        self._is_first = True
        self._base = MainMemory.of_process("self")  # memory that was in use before the first call

    def do(self) -> None:
        """Run calls until the worker has to exit."""
        waiting = select.poll()
        waiting.register(self._line, select.POLLIN)
        stays = True
        while stays:
            if not waiting.poll(_IDLE_S * 1000):
                facts.be_idle()
            try:
                message, files = messages.receive(self._line)
            # The caller closes the socket when it has no further call.
            except messages.Gone:
                return
            # No event is sent for the first call, because the caller assumes that a new worker reads it.
            if not self._is_first:
                self._send({"event": "begun"})
            stays = self._do(message, dict(zip(message["files"], files, strict=True)))
            self._is_first = False

    def _send(self, event: Mapping[str, Any]) -> None:
        # No lock is needed, because each message is sent as a whole. A child of the task could find a lock
        # held by a thread that does not exist in the child.
        with suppress(messages.Gone):  # the task has closed all descriptors
            messages.send(self._line, event)

    def _do(self, message: Mapping[str, Any], files: dict[str, int]) -> bool:
        """Run one call, and return True if the worker can do another one."""
        facts.may_stay = message["stays"]
        facts.keep(files.get("held", -1))
        if not self._is_first:  # an earlier task may have changed the variables
            os.environ.update({**self._origin.env, **message["env"]})
        outcome = self._run(message, files)
        if outcome is None:
            return False
        leave_reply(outcome, files["reply"])
        # A failed task may leave the process in a state that the next task does not expect.
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
        # If the worker does several calls, the memory of a single task is unknown.
        if self._is_first and not stays:
            event["memory_bytes"] = max(0, peak_bytes - self._base.resident_bytes)
            event["mapped_bytes"] = max(0, MainMemory.of_process("self").file_bytes - self._base.file_bytes)
        messages.send(self._line, {**event, "peak_bytes": peak_bytes})
        return stays

    def _run(self, message: Mapping[str, Any], files: Mapping[str, int]) -> Outcome | None:
        """Load the task and its arguments, run it, and return its outcome.

        Returns None if the task did not run. The caller was told the reason, and tries again.
        """
        origin, send = self._origin, self._send
        with events.SeenImports(send, origin.imported), events.sending_to(send, all_threads=True):
            try:
                with set_up(message["setup"]):
                    *request, settings, main = self._request(files)
                    main.install()
                    with nullcontext() if settings is None else settings.applied():
                        return self._run_request(*request)
            except SystemExit as error:  # the task called sys.exit
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
        # Only the first call is checked. Later calls find the variables that the first call has set, which
        # have been accepted.
        if self._is_first and (variables := self._origin.set_too_late()):
            self._send({"event": "set_too_late", "variables": variables})
            return None
        self._send({"event": "task_started"})
        began_s = time.process_time()
        value = function(*args, **kwargs)
        cpu_s = time.process_time() - began_s
        return Outcome(value=value, cpu_s=cpu_s)

    def _request(self, files: Mapping[str, int]) -> tuple[Any, ...]:
        """Return the parts of the request that :func:`flower_gpu.workers.methods.write_request` wrote."""
        if "request" not in files:
            assert self._origin.request is not None
            return self._origin.request
        request: tuple[Any, ...] = transport.read_request(files["request"], files.get("shared", -1))
        return request


def leave_reply(outcome: Outcome, descriptor: int) -> None:
    """Write an outcome into the memory file for the caller."""
    # The format for confined workers is used even if the confinement failed, because the caller expects it.
    is_confined = confinement.is_wanted(os.environ)
    write = confined_replies.write_reply if is_confined else transport.write_reply
    try:
        write(outcome, descriptor)
    except Exception as error:
        os.ftruncate(descriptor, 0)
        write(unsendable(error), descriptor)


def _check_environment(env: Mapping[str, str]) -> None:
    """Raise WorkerStartError if the task's module has changed a variable of the call."""
    # A module may set the number of threads itself. That number takes precedence, as in a process that is not
    # a worker.
    free = {"OMP_NUM_THREADS", *set_by_modules()}
    for name, value in env.items():
        current = os.environ.get(name)
        if current == value or name in free:
            continue
        # The text leaves out the values, which may be secret. It goes into logs, the trace and the reply.
        change = "removed" if current is None else "set to another value"
        raise WorkerStartError(
            f"the worker's environment was changed while the task was loaded: {name} was {change}. Set it "
            "through env= and not in the task's module"
        )
