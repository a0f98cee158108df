"""What a fork of the zygote does: calls of one line, one after the other, as many as its caller wants."""

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

from flower_gpu.isolation import child, cuda_answers, imports, socket_folder, transport
from flower_gpu.isolation.forkserver import sockets
from flower_gpu.isolation.native import adopt_orphans
from flower_gpu.isolation.zygote import wire

# Set by a task after which this process cannot be brought to what another one expects.
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


def seed() -> None:
    """Draw a seed for the libraries that would give the same random numbers in each fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if hasattr(sys.modules.get("torch"), "default_generator"):
        sys.modules["torch"].default_generator.seed()  # the CPU's; CUDA's is made in the worker


def work(
    line: socket.socket,
    stdout: int,
    stderr: int,
    lives: Sequence[int],
    zygotes_end: int,
    imported: Callable[[], list[str]],
) -> None:
    """Do the calls that come on a line, until one of them was the last.

    Parameters
    ----------
    line : socket
        Calls come from it, and what they tell goes to it.
    stdout, stderr : int
        What takes the place of this process's.
    lives : sequence of int
        Read ends of the life pipes of caller and zygote: when one of these is gone, so is this process group.
    zygotes_end : int
        Write end of the zygote's, which a fork has as well.
    imported : callable
        Returns the libraries that calls have imported; the next zygote will have them.
    """
    for pipe in lives:
        # Its own description of the pipe: whom the kernel signals belongs to the description.
        own = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        child.die_with_the_caller(own)
        os.close(pipe)
    os.close(zygotes_end)
    adopt_orphans()  # while this process lives, what it has started stays below it
    socket_folder.take()
    child.be_killed_first()
    cuda_answers.ask_cuda()
    os.dup2(stderr, 2)
    os.dup2(stdout, 1)
    for descriptor in (stdout, stderr):
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Without a lock: each message is sent as a whole, and a child that the task forks could find it taken.
    send = partial(wire.send, line)
    told: list[str] = []

    def tell_imported() -> None:
        nonlocal told
        names = imported()
        if names != told:
            told = names
            send({"event": "imported", "names": names})

    modules = imports.ImportedModules(tell_imported)
    while True:
        try:
            # First this, then the message: if this process is killed in between, the message is still there,
            # and the caller knows whom it had.
            if not line.recv(1, socket.MSG_PEEK):
                break
            send({"event": "started", "pid": os.getpid()})
            message, descriptors = wire.receive(line)
        except (sockets.Gone, OSError):
            break
        if "leave" in message:
            break
        say = _Say(send)
        with imports.seen_by(modules.look):
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
