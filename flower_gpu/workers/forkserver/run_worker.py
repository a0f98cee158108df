"""What a worker of a run's own fork server does: calls of one line, as many as its caller wants."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flower_gpu.frameworks import cuda_answers
from flower_gpu.workers import events, life, socket_folder, transport
from flower_gpu.workers import worker as child
from flower_gpu.workers.forkserver import sockets
from flower_gpu.workers.life import adopt_orphans

# Set by a task that leaves this process in a state that other tasks do not expect.
_has_to_leave = False


# Whether another call may follow the one that runs.
_may_stay = False


def may_stay() -> bool:
    """Tell whether this process may get another call after the one that runs."""
    return _may_stay


def leave_after_this_call() -> None:
    """Let no further call have this worker."""
    global _has_to_leave
    _has_to_leave = True


def work(
    line: socket.socket,
    stdout: int,
    stderr: int,
    lives: Sequence[int],
    servers_end: int,
    imported: Callable[[], list[str]],
) -> None:
    """Do the calls that come on a line, until one of them was the last.

    ``line``: calls come from it, and what they tell goes to it.
    ``lives``: read ends of the life pipes of caller and server: when one of these is gone, so is this process
    group.
    ``servers_end``: write end of the run's fork server's, which a fork has as well.
    ``imported``: returns the libraries that calls have imported; the next server will have them.
    """
    for pipe in lives:
        # Its own description of the pipe: whom the kernel signals belongs to the description.
        own = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        life.die_with_the_caller(own)
        os.close(pipe)
    os.close(servers_end)
    adopt_orphans()  # while this process lives, what it has started stays below it
    socket_folder.take()
    life.be_killed_first()
    cuda_answers.ask_cuda()
    os.dup2(stderr, 2)
    os.dup2(stdout, 1)
    for descriptor in (stdout, stderr):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Without a lock: each message is sent as a whole, and a child that the task forks could find it taken.
    send = partial(sockets.send, line)
    told: list[str] = []

    def tell_imported() -> None:
        nonlocal told
        names = imported()
        if names != told:
            told = names
            send({"event": "imported", "names": names})

    modules = events.ImportedModules(tell_imported)
    while True:
        try:
            # First this, then the message: if this process is killed in between, the message is still there,
            # and the caller knows whom it had.
            if not line.recv(1, socket.MSG_PEEK):
                break
            send({"event": "started", "pid": os.getpid()})
            message, descriptors = sockets.receive(line)
        except (sockets.Gone, OSError):
            break
        if "leave" in message:
            break
        say = _Say(send)
        with events.imports_seen_by(modules.look):
            stays = _do(message, descriptors, say)
        tell_imported()
        if stays is not None:
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            send({"event": "result", "stays": stays, "peak_bytes": peak_bytes, "task_at": say.task_at})
        if not stays:
            break
    atexit._run_exitfuncs()


class _Say:
    """Tells the caller what a task tells; when it began goes with the result, as each message takes time."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send
        self.task_at: float | None = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "task_started":
            self.task_at = time.time()
        else:
            self._send(event)


def _do(message: Mapping[str, Any], descriptors: list[int], send: Any) -> bool | None:
    """Do one call; tell whether another one may come, None if this one has no result."""
    global _may_stay
    _may_stay = bool(message["stays"])
    request, reply, *held = descriptors  # what else came is held open until the end of the call
    child.keep_for_caller(held[0] if held else -1)
    sys.argv[:] = ["-c", f"flower-gpu: {message['label']}"]
    os.environ.update(message["env"])
    load = partial(transport.read_request, request)
    outcome = child.run_task(message["env"], message["setup"], load, send)
    if outcome is None:
        return None
    child.leave_reply(outcome, reply)
    stays = _may_stay
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # the task has closed or replaced it
            stays = False
    for descriptor in descriptors:
        os.close(descriptor)
    # After an error much may be different from what the next client expects to find.
    return stays and outcome.error_type is None and not _has_to_leave
