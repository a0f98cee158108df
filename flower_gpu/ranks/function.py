"""``distributed``: runs a user's function in one rank for each GPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, overload

from flower_gpu.calls import notices
from flower_gpu.calls.grants import ranks
from flower_gpu.kinds import COUNT, SECONDS
from flower_gpu.ranks import run
from flower_gpu.workers.call import Task, check_task, load_task, task_name

#: Runs a function with Flower's Context as an argument, and returns the changes of the Context.
_MESSAGE_CALL = "flower_gpu.flower.rank_messages:call"


class Distributed:
    """The result of :func:`distributed`: a callable with the arguments of the original function.

    Attributes
    ----------
    task : callable or str
        The original function.
    timeout_s : float
        Seconds that the ranks wait for each other at one point.
    num_gpus : int or None
        Number of GPUs that a call requests if its client does not set ``num_gpus``.
    """

    task: Task

    def __init__(self, task: Task, timeout_s: float, num_gpus: int | None) -> None:
        check_task(task)
        if isinstance(task, Distributed):
            task = task.task  # the last options replace the earlier ones
        # A partial or a callable object has no name of its own.
        self.__name__ = self.__qualname__ = task_name(task)
        if not isinstance(task, str):
            functools.update_wrapper(self, task)
        self.task = task
        self.timeout_s = timeout_s
        self.num_gpus = num_gpus

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function: in ranks if the call has several GPUs, otherwise in this process."""
        count = ranks.count()
        if count == 1:
            if self.num_gpus is not None and self.num_gpus > 1 and ranks.is_asked_for_one():
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
        # A decorator replaces the original function in its module, so pickle could not find the original
        # there. This object is pickled by its name instead.
        if not isinstance(self.task, str) and self.__module__ != "__main__":
            attribute: Any = sys.modules.get(self.__module__)
            for name in self.__qualname__.split("."):
                attribute = getattr(attribute, name, None)
            if attribute is self:
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
    """Run a function with one process (rank) for each GPU in the lease of its call.

    Use it as a function, or as a decorator with or without options. Each rank calls the function with the
    same arguments, in a process group of ``torch.distributed``, on its own device. If the call has one GPU or
    requested one, the function is called without ranks.

    Parameters
    ----------
    task : callable or str
        The function, or ``"package.module:function"``. With a text, only workers import the module.
    num_gpus : int, optional
        Number of GPUs that a :class:`flower_gpu.GPUClient` requests when it calls this function, instead of
        the client's own ``num_gpus``. A client that gets the function as a text does not see this number:
        pass it to the client as well. On a node without GPUs, this number of ranks runs on the CPU.
    timeout_s : float
        Seconds that ranks wait for each other at one point. Then the call fails and names the missing rank.

    Returns
    -------
    Distributed
        A callable with the same arguments. It returns the value of rank 0. In a result of Flower, numeric
        metrics are averaged over the ranks.

    Raises
    ------
    ConfigError, TypeError
        If a value is invalid or has the wrong type.
    RankError
        When called, if a rank failed. The message gives the rank and the reason. The other ranks are ended.

    Notes
    -----
    A function that returns the number of examples must count the whole data set, not the part of one rank.

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
