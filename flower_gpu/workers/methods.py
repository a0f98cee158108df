"""Start methods: the properties of each, its start of a worker, and the choice between them."""

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

#: Held while pipes are made and a worker is started: a fork in another thread must not inherit the
#: worker's ends of them before the caller has closed its copies.
start_lock = OwnLock()


#: A started worker, leader of its own process group.
Process = OwnChild | client.Forked


class ForkInsteadError(Exception):
    """No fork server can have this call: there is none, or something of the call cannot be passed to it."""


def prepare(
    call: Call,
    method: StartMethod,
    otherwise: StartMethod | None,
    deadline: float | None,
    place: client.ServerPlace | None,
    files: dict[str, int],
) -> tuple[StartMethod, client.ServerPlace | None]:
    """Prepare the start of a worker; may take long, and may be interrupted.

    ``otherwise``: how to start it where there can be no fork server; with FORK it raises ForkInsteadError
    there, and where the call cannot be passed on. ``place``: one that an earlier call has had; it is closed
    where it is of no use for this one. ``files``: takes the memory files of the request, where the worker
    does not have that by itself, in the place of those of an earlier try.
    Returns how it starts, and the place at the fork server that will fork it. TimeoutError if there is no
    fork server until the deadline, on the clock of ``time.monotonic``.
    """
    if method.is_own_process and getattr(multiprocessing.current_process(), "_inheriting", False):
        # As multiprocessing itself: the worker would run the script that starts it, and so on without end.
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
                state_folder.remove_left_socket_folders()  # of killed callers
            if not method.copies_caller:
                write_request(call, files, preloaded=place is not None)
    except BaseException as error:
        if place is not None:
            place.close()
        if otherwise is FORK and isinstance(error, WorkerStartError):
            raise ForkInsteadError from error
        raise
    return method, place


# Calls of these tasks, or with this to preload, are spawned, because there can be no fork server for them.
_spawned_instead: set[str] = set()
# What modules of tasks set before they import libraries: they need a server whose libraries have read that.
_set_by_modules: dict[str, dict[str, str]] = {}


def _key(call: Call) -> str:
    return repr([*call.keys, call.preload])


def _found_place(
    call: Call, otherwise: StartMethod | None, deadline: float | None
) -> client.ServerPlace | None:
    """Return a place at a fork server; None: there can be none, and the worker is spawned."""
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
    """Note the variables that a task's module sets, for the next try of the call and for all later calls.

    Raises WorkerStartError if no fork server can have that, and the call must not be spawned.
    """
    key = _key(call)
    values = {name: value for name, value in variables.items() if value is not None}
    if len(values) == len(variables) and key not in _set_by_modules:
        _set_by_modules[key] = values
        return
    names = ", ".join(sorted(variables))
    text = f"{call.label}: its module removes {names} from the environment, or sets it anew in each worker"
    if not may_spawn:
        raise WorkerStartError(f"{text}. Set it with env=, or use start_method='spawn'")
    _spawn_instead(key, text)


def _spawn_instead(key: str, reason: str) -> None:
    warnings.warn(f"workers are spawned, which is slower: {reason}", RuntimeWarning, stacklevel=2)
    _spawned_instead.add(key)


def write_request(call: Call, files: dict[str, int], *, preloaded: bool, is_new: bool = True) -> None:
    """Write a call's task and arguments into memory files, which ``files`` takes.

    ``is_new``: whether its worker has run no call before, and so takes over settings of this process.
    Raises WorkerStartError if they cannot be passed on.
    """
    try:
        files["request"] = transport.create("flower-gpu-request")
        functions = () if preloaded else call.preload
        settings = CallerSettings.of_this_process(only_start_method=not call.takes_over) if is_new else None
        main = MainModule.of_this_process()
        everything = (call.task, call.args, dict(call.kwargs), functions, call.log_prefix, settings, main)
        if (shared := transport.write_request(everything, files["request"], main.note)) >= 0:
            files["shared"] = shared
    except OSError as error:  # no memory for it, or a limit
        raise WorkerStartError(f"cannot start a worker: {error}") from error
    except Exception as error:
        what = f"{task_name(call.task)} or its arguments"
        if getattr(call.task, "__module__", "").partition(".")[0] == "flower_gpu":
            what = "the function, or what it is called with,"  # the user's function is among the arguments
        raise WorkerStartError(
            f"{call.label}: {what} cannot be passed to a worker "
            f"({type(error).__name__}: {error}). Functions of modules that can be imported and plain values "
            "can"
        ) from error


def send_call(call: Call, to: socket.socket, files: Mapping[str, int], *, stays: bool) -> None:
    """Send a call to its worker, with its memory files; Gone if the worker is.

    ``stays``: whether it may have another call afterwards.
    """
    sent = dict(files)
    # A confined worker must not have the lock of its lease: it could give it up, and use the GPU on.
    if call.held >= 0 and call.confinement is None:
        sent["held"] = call.held
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
    """Make the lines to a worker, send it its first call, and start it.

    ``ours``: closes the caller's ends of the lines; the kernel then kills the rest of the worker's process
    group.
    Returns the worker, the socket that takes calls to it and what it tells from it, and the read ends of its
    standard output and error.
    Raises WorkerStartError if it could not be started.
    Raises Gone if its fork server has ended meanwhile; then everything has to be prepared anew.
    """
    # Theirs are closed at once: with a copy here, the end of the worker's streams would never be seen.
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
    """Turn ``"auto"`` into the method for this process, and check a method that was asked for.

    ================================================  ==============  =================
    this process                                      the function    ``auto``
    ================================================  ==============  =================
    not on Linux, or before Linux 5.3                 any             spawn
    no ``flwr-clientapp``                             any             forkserver
    ``flwr-clientapp``                                ``server_first``  forkserver
    ``flwr-clientapp``                                any other one   fork
    the same, with threads of the app's               any other one   forkserver
    the same, with CUDA initialised, or TensorFlow's  any other one   spawn
    or JAX's threads started
    ================================================  ==============  =================

    A ``flwr-clientapp`` is new for every message: forking it imports nothing twice and pickles nothing. A
    fork could use neither a CUDA that is initialised nor threads that have started. Threads of the app's are
    those that its modules, or the libraries that they import, have started (:mod:`.thread_owners`).

    ``server_first``: the call preloads data, which a fork server keeps; or its function is only named, so it
    needs nothing of this process but libraries, which the server has.
    ConfigError if the method that was asked for cannot be used here.
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
            "would wait for its threads for ever. Use 'auto' or 'spawn', or compute in the worker only"
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
    """Choose the start method for a worker that a worker starts: never a copy of the first one."""
    is_spawn = start_method == SPAWN.name or not client.is_supported()
    return SPAWN if is_spawn else FORKSERVER


def spawn(call: Call, _: client.ServerPlace | None, ends: child.Ends) -> Process:
    """Start a fresh interpreter. Works everywhere; pays for every import."""
    # Not multiprocessing's spawn: that imports the caller's __main__ again in every worker, which runs a
    # script without a main guard once more, and leaves a resource tracker process with every caller.
    # Of env only the names: everybody on the machine may read a command line.
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
        # What a confined worker starts must not join the group of another one: then a session of its own.
        process_group=0 if call.confinement is None else None,
        start_new_session=call.confinement is not None,
    )
    return OwnChild(process.pid, reaped=process.wait)


def fork(call: Call, _: client.ServerPlace | None, ends: child.Ends) -> Process:
    """Fork this process. Nothing is pickled or imported again; CUDA must be untouched here."""
    threads.release_openmp_threads()
    for stream in (sys.stdout, sys.stderr):  # or the worker would have a copy of what is buffered
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    request = (call.task, call.args, dict(call.kwargs), call.preload, call.log_prefix, None, MainModule())
    origin = child.Origin(call.env, request, imported=_imported_by_fork())

    def work() -> None:
        atexit._clear()  # of the caller, which is not at its end
        if "concurrent.futures.thread" in sys.modules:  # at its end a worker would join the caller's threads
            sys.modules["concurrent.futures.thread"]._threads_queues.clear()
        child.forked(ends, origin)
        child.leave()

    pid = _fork_between_imports(work, f"flower-gpu: {call.label}")
    return OwnChild(pid)


_IMPORT_LIMIT_S = 60.0
_endless_imports: set[str] = set()  # as of a program that runs while it is imported


def _fork_between_imports(work: Callable[[], None], name: str) -> int:
    """Fork while no other thread imports a module: a fork would have half of it, and wait for ever."""
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
    """Fork; None if an import had begun by then, which only the fork can tell: it has ended."""
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
    # Nothing public tells it. A lock lives as long as somebody imports the module, or waits for that.
    locks = importlib._bootstrap._module_locks  # type: ignore[attr-defined]
    here = threading.get_ident()
    found = {name for name, get in list(locks.items()) if (lock := get()) is not None and lock.owner != here}
    return found - _endless_imports


def _imported_by_fork() -> Callable[[], list[str]] | None:
    """Return what tells a fork of this process what it had to import, where somebody wants to know that."""
    if facts.imported_by_forks is None:
        return None
    from flower_gpu.workers.forkserver import libraries  # there is no lighter way to it

    folders = identity.installed_folders(sys.path)
    return partial(libraries.imported_since, len(sys.modules), folders)


def forkserver(call: Call, place: client.ServerPlace | None, ends: child.Ends) -> Process:
    """Have the host's fork server fork itself: its libraries are there, and CUDA is untouched."""
    assert place is not None
    message = {"op": "fork", "label": call.label}
    return place.fork(message, [ends.life, ends.calls, ends.stdout, ends.stderr])


def no_start(*_: object) -> Process:
    """Refuse: such a call needs no new process."""
    raise AssertionError("this start method starts no worker")


@dataclass(frozen=True)
class StartMethod:
    """One way to run a call: its properties, and the start of its worker."""

    name: str
    #: Starts a worker for a call, with the worker's ends of the lines to the caller.
    start: Callable[[Call, client.ServerPlace | None, child.Ends], Process] = no_start
    #: Whether the call runs in a process of its own. Only such a call is supervised: it can be ended, its
    #: death is one error, and its memory is free afterwards.
    is_own_process: bool = True
    #: Whether the worker begins with the caller's libraries and settings: as a copy of it, or as itself.
    copies_caller: bool = False
    #: Whether a fork server forks the worker.
    from_server: bool = False

    def __str__(self) -> str:
        return self.name


FORKSERVER = StartMethod("forkserver", forkserver, from_server=True)
SPAWN = StartMethod("spawn", spawn)
FORK = StartMethod("fork", fork, copies_caller=True)
IN_PROCESS = StartMethod("in-process", is_own_process=False, copies_caller=True)

#: All of them, by name: what a user may ask for (``flower_gpu.options.START_METHODS``).
METHODS = {method.name: method for method in (FORKSERVER, SPAWN, FORK, IN_PROCESS)}


@contextmanager
def _standard_descriptors_occupied() -> Iterator[None]:
    """Let nothing of the worker get the number of a standard stream that this program has closed.

    The worker's own standard streams are put there, on top of whatever has the number.
    """
    with ExitStack() as held:
        try:
            while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
                held.callback(os.close, descriptor)
        except OSError as error:
            raise WorkerStartError(f"cannot start a worker: {error}") from error
        os.close(descriptor)
        yield
