"""``distributed``: a user's function that runs in one rank for each GPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, overload

from flower_gpu.calls import notices
from flower_gpu.kinds import COUNT, SECONDS
from flower_gpu.ranks import run
from flower_gpu.workers.call import Task, check_task, load_task, task_name

#: Runs a function that gets Flower's Context; it knows what of that has to come back.
_MESSAGE_CALL = "flower_gpu.flower.rank_messages:call"


class Distributed:
    """What :func:`distributed` returns: a function, to be called as the one it was made of.

    Attributes
    ----------
    task : callable or str
        The function it was made of.
    timeout_s : float
        Seconds that its ranks wait for each other at one point.
    num_gpus : int or None
        How many GPUs a call of it asks for where its client leaves that to it.
    """

    task: Task

    def __init__(self, task: Task, timeout_s: float, num_gpus: int | None) -> None:
        check_task(task)
        if isinstance(task, Distributed):
            task = task.task  # its options are those that are given last
        self.__name__ = self.__qualname__ = task_name(task)  # a partial, or an object, has none of its own
        if not isinstance(task, str):
            functools.update_wrapper(self, task)
        self.task = task
        self.timeout_s = timeout_s
        self.num_gpus = num_gpus

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: in ranks in a worker that has several GPUs, or should have; else here."""
        count = run.how_many()
        if count == 1:
            if self.num_gpus is not None and self.num_gpus > 1 and run.is_asked_for_one():
                notices.say_once(
                    f"{self.__name__} is for {self.num_gpus} GPUs, but its call has asked for one: the "
                    "client has the function's name only, and does not know its num_gpus. Give "
                    f"num_gpus={self.num_gpus} to the client, the mod or simulate as well"
                )
            return load_task(self.task)(*args, **kwargs)
        if any(_is_context(value) for value in args):
            return load_task(_MESSAGE_CALL)(self, self.timeout_s, count, *args, **kwargs)
        return run.run(self, self.timeout_s, count, args, kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        # A decorated function is in its module under the name of the one that it was made of, which could
        # not be found there then.
        if not isinstance(self.task, str) and self.__module__ != "__main__":
            found: Any = sys.modules.get(self.__module__)
            for name in self.__qualname__.split("."):
                found = getattr(found, name, None)
            if found is self:
                return self.__qualname__
        return Distributed, (self.task, self.timeout_s, self.num_gpus)


def _is_context(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("state", "node_config", "run_config"))


@overload
def distributed(task: Task, *, num_gpus: int | None = None, timeout_s: float = 600.0) -> Distributed: ...
@overload
def distributed(
    *, num_gpus: int | None = None, timeout_s: float = 600.0
) -> Callable[[Callable[..., Any]], Distributed]: ...
def distributed(task: Task | None = None, *, num_gpus: int | None = None, timeout_s: float = 600.0) -> Any:
    """Run a function with one process (rank) for each GPU that its call has leased.

    Around a function, or as a decorator with or without options. The function is called in every rank with
    the same arguments, in a process group of ``torch.distributed``, on the device of its rank.
    On one GPU, or none where one was asked for, it is simply called.

    Parameters
    ----------
    task : callable or str
        The function, or ``"package.module:function"``: then only workers import that module.
    num_gpus : int, optional
        How many GPUs a :class:`flower_gpu.GPUClient` asks for when it calls this function; in place of the
        client's own ``num_gpus``. A client that is given the function as text does not see this: give the
        number to the client. On a node without GPUs as many ranks run on the CPU.
    timeout_s : float
        Seconds that ranks wait for each other at one point; then the one that is not there is named.

    Returns
    -------
    Distributed
        A function with the same arguments. It returns what rank 0 returned: of a pair or triple of Flower
        with numeric metrics averaged over the ranks.

    Raises
    ------
    ConfigError, TypeError
        If a value cannot be used, or has the wrong type.
    RankError
        When called: if a rank failed. The message says which and why; the others are ended.

    Notes
    -----
    Where a function returns the number of examples, it is that of all of its data, not of one rank's part.

    Examples
    --------
    >>> @distributed(num_gpus=2)
    ... def train(weights, config): ...
    >>> client = GPUClient(train, context=context)
    """
    SECONDS.check(timeout_s, "timeout_s of a distributed function")
    if num_gpus is not None:
        COUNT.check(num_gpus, "num_gpus of a distributed function")
    if task is None:
        return lambda function: Distributed(function, timeout_s, num_gpus)
    return Distributed(task, timeout_s, num_gpus)
