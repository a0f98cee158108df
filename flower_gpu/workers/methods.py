"""Start methods: their properties, how each starts a worker, and the choice between them.

A start has two steps. :func:`prepare` may take long and may be interrupted: it finds or starts a fork server,
and writes the request into memory files. :func:`launch` is short and holds ``start_lock``: it makes the pipes
and the socket, sends the first call and starts the worker.

The lock prevents a race. A fork in another thread would inherit the worker's ends of the pipes. The caller
would then never see the end of the worker's output, because the other fork still holds the write ends. So
no thread starts a worker until this one has closed its copies.

The fork server may end between the two steps. Then :func:`launch` raises Gone, and the caller prepares again.

:func:`fork` has two more races, both with other threads of the caller:

- A thread may be importing a module. The fork would have half of the module, and wait forever for the import
  lock. So ``_fork_between_imports`` waits until no import runs, and the fork checks that again: an import
  could have begun in between. In this case the fork ends, and the caller tries again.
- Threads of OpenMP do not exist in the fork, so they are released before.
"""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flower_gpu import frameworks
from flower_gpu.errors import ConfigError, WorkerStartError
from flower_gpu.frameworks.cuda_answers import initialized_cuda_devices
from flower_gpu.workers import messages, state_folder, thread_owners, threads, transport
from flower_gpu.workers import worker as child
from flower_gpu.workers.call import Call, task_name
from flower_gpu.workers.caller_settings import CallerSettings, MainModule
from flower_gpu.workers.forkserver import client, identity
from flower_gpu.workers.interrupts import allowed_interrupts
from flower_gpu.workers.life import OwnChild, close_life_end, explained, life_pipe
from flower_gpu.workers.messages import Gone as Gone
from flower_gpu.workers.own_process import OwnLock, environment, facts

#: Held while pipes are made and a worker is started. A fork in another thread must not inherit the worker's
#: ends of the pipes before the caller has closed its copies.
start_lock = OwnLock()


#: A started worker, which leads its own process group.
Process = OwnChild | client.Forked


class ForkInsteadError(Exception):
    """No fork server can do this call: there is no server, or the call cannot be passed to it."""


def prepare(
    call: Call,
    method: StartMethod,
    otherwise: StartMethod | None,
    deadline: float | None,
    place: client.ServerPlace | None,
    files: dict[str, int],
) -> tuple[StartMethod, client.ServerPlace | None]:
    """Return the start method for a worker, and the place at the fork server that will fork it or None.

    May take long, and may be interrupted.

    ``otherwise``: start method if no fork server can be used. With FORK, ForkInsteadError is raised then, and
    also if the call cannot be passed on.
    ``deadline``: time limit on the clock of ``time.monotonic``.
    ``place``: the place of an earlier call. It is closed if this call cannot use it.
    ``files``: receives the memory files of the request, and loses the files of an earlier try. It stays
    without a request if the worker inherits the request by fork.

    Raises TimeoutError if no fork server is ready before the deadline.
    """
    if method.is_own_process and getattr(multiprocessing.current_process(), "_inheriting", False):
        # multiprocessing refuses this as well. The worker would run the script that starts it, which would
        # start the next worker, without end.
        raise WorkerStartError(
            f"{call.label}: multiprocessing imports this script in a new process, and the script starts a "
            "worker meanwhile. Put the lines that do so below if __name__ == '__main__':"
        )
    for name in files.keys() - {"reply"}:
        os.close(files.pop(name))
    try:
        with _standard_descriptors_occupied():
            if place is not None and not (method.from_server and place.is_for(call)):
                place.close()
                place = None
            if method.from_server and place is None:
                place = _found_place(call, otherwise, deadline)
                method = SPAWN if place is None else method
            elif not method.from_server:
                # Workers of killed callers may have left such folders.
                state_folder.remove_left_socket_folders()
            if not method.copies_caller:
                write_request(call, files, preloaded=place is not None)
    except BaseException as error:
        if place is not None:
            place.close()
        if otherwise is FORK and isinstance(error, WorkerStartError):
            raise ForkInsteadError from error
        raise
    return method, place


# Keys of calls whose workers are spawned, because no fork server can do these calls.
_spawned_instead: set[str] = set()
# Variables that modules of tasks set before they import libraries, by keys of calls. Such calls need a server
# whose libraries have read these variables.
_set_by_modules: dict[str, dict[str, str]] = {}


def _key(call: Call) -> str:
    return repr([*call.keys, call.preload])


def _found_place(
    call: Call, otherwise: StartMethod | None, deadline: float | None
) -> client.ServerPlace | None:
    """Return a place at a fork server, or None if the worker must be spawned instead."""
    key = _key(call)
    if otherwise is SPAWN and key in _spawned_instead:
        return None
    try:
        return client.find(call, deadline, _set_by_modules.get(key, {}))
    except TimeoutError:
        raise
    except (OSError, ConfigError, WorkerStartError) as error:
        reason = explained(error) if isinstance(error, OSError) else str(error)
        if otherwise is not SPAWN:
            raise WorkerStartError(f"cannot start a worker: {reason}") from error
        _spawn_instead(key, reason)
        return None


def remember_variables(call: Call, variables: Mapping[str, str | None], *, may_spawn: bool) -> None:
    """Remember the variables that a task's module sets, for the next try and for all later calls.

    Raises WorkerStartError if no fork server can provide them, and the call must not be spawned.
    """
    key = _key(call)
    values = {name: value for name, value in variables.items() if value is not None}
    if len(values) == len(variables) and key not in _set_by_modules:
        _set_by_modules[key] = values
        return
    names = ", ".join(sorted(variables))
    text = f"{call.label}: its module removes {names} from the environment, or sets it again in each worker"
    if not may_spawn:
        raise WorkerStartError(f"{text}. Set it with env=, or use start_method='spawn'")
    _spawn_instead(key, text)


def _spawn_instead(key: str, reason: str) -> None:
    warnings.warn(f"workers are spawned, which is slower: {reason}", RuntimeWarning, stacklevel=2)
    _spawned_instead.add(key)


def write_request(call: Call, files: dict[str, int], *, preloaded: bool, is_new: bool = True) -> None:
    """Write a call's task and arguments into memory files, and add these to ``files``.

    ``is_new``: True if the worker has run no call before, so that it takes over settings of this process.
    Raises WorkerStartError if the task or its arguments cannot be passed on.
    """
    try:
        files["request"] = transport.create("flower-gpu-request")
        functions = () if preloaded else call.preload
        settings = CallerSettings.of_this_process(only_start_method=not call.takes_over) if is_new else None
        main = MainModule.of_this_process()
        everything = (call.task, call.args, dict(call.kwargs), functions, call.log_prefix, settings, main)
        if (shared := transport.write_request(everything, files["request"], main.note)) >= 0:
            files["shared"] = shared
    except OSError as error:  # no memory, or a limit was reached
        raise WorkerStartError(f"cannot start a worker: {error}") from error
    except Exception as error:
        what = f"{task_name(call.task)} or its arguments"
        if getattr(call.task, "__module__", "").partition(".")[0] == "flower_gpu":
            # The task is a function of ours, so the user's function is among the arguments.
            what = "the function, or what it is called with,"
        raise WorkerStartError(
            f"{call.label}: {what} cannot be passed to a worker "
            f"({type(error).__name__}: {error}). Use functions of modules that can be imported, and plain "
            "values"
        ) from error


def send_call(call: Call, to: socket.socket, files: Mapping[str, int], *, stays: bool) -> None:
    """Send a call to its worker, with its memory files; raise Gone if the worker has exited.

    ``stays``: True if the worker may get another call afterwards.
    """
    sent = dict(files)
    # A confined worker must not hold the lock of its lease. It could release the lock and go on using the
    # GPU.
    if call.lease_descriptor >= 0 and call.confinement is None:
        sent["held"] = call.lease_descriptor
    count = {name: call.env[name] for name in (threads.VARIABLE,) if name in call.env}
    message = {"setup": call.setup, "env": count, "stays": stays, "files": list(sent)}
    messages.send(to, message, list(sent.values()))


def launch(
    call: Call,
    method: StartMethod,
    place: client.ServerPlace | None,
    files: Mapping[str, int],
    ours: ExitStack,
    *,
    stays: bool,
) -> tuple[Process, socket.socket, int, int]:
    """Start a worker, and send it its first call.

    ``ours``: closes the caller's ends of the connections. The kernel then kills the rest of the worker's
    process group.

    Returns the worker, the socket for calls and reports, and the read ends of the worker's standard output
    and error.
    Raises WorkerStartError if the worker could not be started.
    Raises Gone if its fork server has ended. Then call :func:`prepare` again.
    """
    # The worker's ends are closed at once. With a copy here, the caller would never see the end of the
    # worker's output.
    with start_lock, _standard_descriptors_occupied(), ExitStack() as theirs:

        def pipe() -> tuple[int, int]:
            read, write = os.pipe()
            ours.callback(os.close, read)
            theirs.callback(os.close, write)
            return read, write

        try:
            calls, workers_calls = messages.pair()
            ours.callback(calls.close)
            theirs.callback(workers_calls.close)
            life_read, life_write = life_pipe()
            theirs.callback(os.close, life_read)
            ours.callback(close_life_end, life_write)
            (stdout, stdout_write), (stderr, stderr_write) = pipe(), pipe()
            send_call(call, calls, files, stays=stays)
            ends = child.Ends(life_read, workers_calls.fileno(), stdout_write, stderr_write)
            return method.start(call, place, ends), calls, stdout, stderr
        except OSError as error:
            raise WorkerStartError(f"cannot start a worker: {explained(error)}") from error


def choose(start_method: str, *, server_first: bool = False) -> StartMethod:
    """Return the start method to use: the best method for ``"auto"``, otherwise the given method.

    ================================================  ================  ==========
    this process                                      the function      ``auto``
    ================================================  ================  ==========
    not on Linux, or before Linux 5.3                 any               spawn
    not a ``flwr-clientapp``                          any               forkserver
    ``flwr-clientapp``                                ``server_first``  forkserver
    ``flwr-clientapp``                                any other         fork
    the same, with threads of the app's               any other         forkserver
    the same, with CUDA initialised, or TensorFlow's  any other         spawn
    or JAX's threads started
    ================================================  ================  ==========

    Each message gets a new ``flwr-clientapp``, so forking it imports nothing twice and pickles nothing. But a
    fork can use neither an initialised CUDA nor threads that have started. "Threads of the app's" are threads
    started by its modules, or by libraries that they import (:mod:`.thread_owners`).

    ``server_first``: True if the call preloads data, which a fork server keeps. Also True if the function is
    given by name. Then the call needs only libraries of this process, and the server has those.
    Raises ConfigError if the given method cannot be used here.
    """
    asked = None if start_method == "auto" else METHODS[start_method]
    gpus = initialized_cuda_devices()
    if asked is FORK and gpus is not None:
        raise ConfigError(
            "start_method='fork' cannot be used: this process has initialised CUDA, so a fork of it "
            "could not use a GPU. Use 'auto' or 'spawn'"
        )
    runtime = frameworks.with_threads()
    if asked is FORK and runtime is not None:
        raise ConfigError(
            f"start_method='fork' cannot be used: this process has computed with {runtime}, and a fork of it "
            "would wait for its threads forever. Use 'auto' or 'spawn', or compute in the worker only"
        )
    if asked is FORKSERVER and not client.is_supported():
        raise ConfigError("start_method='forkserver' needs Linux 5.3 or later. Use 'auto' or 'spawn'")
    if asked is not None:
        return asked
    in_client_app = Path("".join(sys.argv[:1])).name == "flwr-clientapp" and sys.platform == "linux"
    if in_client_app and not (server_first and client.is_supported()):
        if gpus is not None or runtime is not None:
            return SPAWN
        if not thread_owners.missed_in_fork():
            return FORK
    return FORKSERVER if client.is_supported() else SPAWN


def choose_in_worker(start_method: str | None) -> StartMethod:
    """Return the start method for a worker that a worker starts. It is never fork."""
    is_spawn = start_method == SPAWN.name or not client.is_supported()
    return SPAWN if is_spawn else FORKSERVER


def spawn(call: Call, _: client.ServerPlace | None, ends: child.Ends) -> Process:
    """Start a fresh interpreter. This works everywhere, but each worker repeats every import."""
    # multiprocessing's spawn is not used. It imports the caller's __main__ in every worker, so a script
    # without a main guard would run again. It also leaves a resource tracker process with every caller.
    # The record has the names of env only, because every account of the host can read a command line.
    record = {"ends": {"life": ends.life, "calls": ends.calls}, "env": list(call.env)}
    path = [entry for entry in sys.path if isinstance(entry, str)]
    command = identity.fresh_interpreter(f"{child.__name__}:spawned", path)
    process = subprocess.Popen(
        [*command, json.dumps(record), f"flower-gpu: {call.label}"],
        stdin=subprocess.DEVNULL,
        stdout=ends.stdout,
        stderr=ends.stderr,
        env=environment(call.env),
        pass_fds=(ends.life, ends.calls),
        # A confined worker gets its own session, so that its processes cannot join another worker's group.
        process_group=0 if call.confinement is None else None,
        start_new_session=call.confinement is not None,
    )
    return OwnChild(process.pid, reaped=process.wait)


def fork(call: Call, _: client.ServerPlace | None, ends: child.Ends) -> Process:
    """Fork this process. Nothing is pickled or imported again. CUDA must not be initialised here."""
    threads.release_openmp_threads()
    # Buffered output would be copied into the worker and written twice.
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    request = (call.task, call.args, dict(call.kwargs), call.preload, call.log_prefix, None, MainModule())
    origin = child.Origin(call.env, request, imported=_imported_by_fork())

    def work() -> None:
        atexit._clear()  # These functions belong to the caller, which is not exiting.
        # At its exit, a worker would join the caller's threads, which do not exist in the worker.
        if "concurrent.futures.thread" in sys.modules:
            sys.modules["concurrent.futures.thread"]._threads_queues.clear()
        child.forked(ends, origin)
        child.leave()

    pid = _fork_between_imports(work, f"flower-gpu: {call.label}")
    return OwnChild(pid)


_IMPORT_LIMIT_S = 60.0
# Modules whose import took longer than the limit, for example a program that runs while it is imported.
_endless_imports: set[str] = set()


def _fork_between_imports(work: Callable[[], None], name: str) -> int:
    """Fork while no other thread imports a module, and return the child's pid.

    Otherwise the fork would have half of that module, and wait forever for the rest.
    """
    deadline = time.monotonic() + _IMPORT_LIMIT_S
    while True:
        if others := _imports_of_other_threads():
            if time.monotonic() > deadline:
                _endless_imports.update(others)
            with allowed_interrupts():
                time.sleep(0.002)
        elif (pid := _fork_if_whole(work, name)) is not None:
            return pid


def _fork_if_whole(work: Callable[[], None], name: str) -> int | None:
    """Fork and return the child's pid; None if an import had begun just before the fork.

    Only the fork can see such an import. It reports that and ends.
    """
    read, write = os.pipe()

    def begin() -> None:
        is_whole = not _imports_of_other_threads()
        os.write(write, b"1" if is_whole else b"0")
        os.close(read)
        os.close(write)
        if is_whole:
            work()

    try:
        pid = child.fork_process(begin, name)
    except BaseException:
        os.close(read)
        raise
    finally:
        os.close(write)
    with open(read, "rb") as answer:
        if answer.read(1) != b"0":
            return pid
    os.waitpid(pid, 0)
    return None


def _imports_of_other_threads() -> set[str]:
    # There is no public interface for this. A lock exists while a thread imports the module or waits for it.
    locks = importlib._bootstrap._module_locks  # type: ignore[attr-defined]
    here = threading.get_ident()
    names = {name for name, get in list(locks.items()) if (lock := get()) is not None and lock.owner != here}
    return names - _endless_imports


def _imported_by_fork() -> Callable[[], list[str]] | None:
    """Return a function that lists the imports of a fork, or None if no fork server wants them."""
    if facts.imported_by_forks is None:
        return None
    # Imported only here, because the module is heavy.
    from flower_gpu.workers.forkserver import libraries

    folders = identity.installed_folders(sys.path)
    return partial(libraries.imported_since, len(sys.modules), folders)


def forkserver(call: Call, place: client.ServerPlace | None, ends: child.Ends) -> Process:
    """Ask a fork server to fork itself. It has imported the libraries, and has not initialised CUDA."""
    assert place is not None
    message = {"op": "fork", "label": call.label}
    return place.fork(message, [ends.life, ends.calls, ends.stdout, ends.stderr])


def no_start(*_: object) -> Process:
    """Raise AssertionError, because a call in this process starts no worker."""
    raise AssertionError("this start method starts no worker")


@dataclass(frozen=True)
class StartMethod:
    """One way to run a call: its properties, and the function that starts a worker."""

    name: str
    #: Function that starts a worker for a call, with the worker's ends of the connections.
    start: Callable[[Call, client.ServerPlace | None, child.Ends], Process] = no_start
    #: True if the call runs in a process of its own. Only such a call is supervised: it can be ended, its
    #: crash is one error, and its memory is free afterwards.
    is_own_process: bool = True
    #: True if the worker begins with the caller's libraries and settings, as a fork or the caller itself.
    copies_caller: bool = False
    #: True if a fork server forks the worker.
    from_server: bool = False

    def __str__(self) -> str:
        return self.name


FORKSERVER = StartMethod("forkserver", forkserver, from_server=True)
SPAWN = StartMethod("spawn", spawn)
FORK = StartMethod("fork", fork, copies_caller=True)
IN_PROCESS = StartMethod("in-process", is_own_process=False, copies_caller=True)

#: All start methods by their names, which a user may choose from (``flower_gpu.options.START_METHODS``).
METHODS = {method.name: method for method in (FORKSERVER, SPAWN, FORK, IN_PROCESS)}


@contextmanager
def _standard_descriptors_occupied() -> Iterator[None]:
    """Occupy descriptors 0 to 2 in the block if this program has closed them.

    Otherwise a pipe of the worker could get such a number. The worker's own standard streams would then
    replace it.
    """
    with ExitStack() as fillers:
        try:
            while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
                fillers.callback(os.close, descriptor)
        except OSError as error:
            raise WorkerStartError(f"cannot start a worker: {error}") from error
        os.close(descriptor)
        yield
