"""One line that gives an existing ``ClientApp`` leases, caps, isolation and device policy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any, Unpack, overload

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from flower_gpu.calls import leasing
from flower_gpu.calls.settings import CallSettings, call_settings
from flower_gpu.errors import ConfigError, text_of
from flower_gpu.flower import message_call
from flower_gpu.flower.message_call import PARTITION_KEY
from flower_gpu.flower.private_names import EMPTY_LIFESPAN, find
from flower_gpu.options import CallOptions, joined
from flower_gpu.workers.call import task_key

#: Options of the calls of one client, by its Context; or a table of them by its ``partition-id``.
Resources = Callable[[Context], Mapping[str, Any] | None] | Mapping[Any, Mapping[str, Any]]


class GPUMod:
    """What :func:`gpu_mod` returns: a Flower mod."""

    def __init__(self, resources: Resources | None, options: Mapping[str, Any]) -> None:
        if "context" in options:
            raise TypeError("gpu_mod has no option 'context': each message brings its own")
        if not (resources is None or callable(resources) or isinstance(resources, Mapping)):
            raise TypeError(
                "resources must be a function of the Context or a table by partition-id, not a "
                f"{type(resources).__name__}"
            )
        self._options = dict(options)
        self._resources = resources
        if isinstance(resources, Mapping):
            self._resources = {str(partition): _checked(own) for partition, own in resources.items()}
        # What cannot be used is said where it is written.
        call_settings(self._options)
        for own in self._resources.values() if isinstance(self._resources, Mapping) else ():
            call_settings(joined(self._options, own))

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Run the next mod or the function in a worker; called by Flower.

        Raises
        ------
        FlowerGPUError
            If there was no GPU or worker for it, or it failed. Flower makes an error message of it.
        """
        if leasing.is_worker() or any(_is_ours(mod) for mod, _ in _inner(call_next)):
            # In a worker already, or the function has a mod of its own, which knows better what it needs.
            return call_next(message, context)
        return message_call.call(
            message_call.run,
            (_Rest(call_next, _lifespan()),),
            message,
            context,
            lambda: self._settings(context, call_next),
            name=_name(call_next),
        )

    def _settings(self, context: Context, call_next: ClientAppCallable) -> CallSettings:
        options = {**self.options_of(context, call_next), "context": context}
        return call_settings(options, name=message_call.client_of(context))

    def options_of(self, context: Context, call_next: ClientAppCallable) -> dict[str, Any]:
        """Return the options of a client's calls of a function.

        Raises ConfigError or TypeError if what the app says of this client is no mapping of options.
        """
        options = joined(self._options, self._own(context))
        num_gpus = getattr(_innermost(call_next), "num_gpus", None)
        if num_gpus is not None:  # of a function that was made with `distributed`
            options |= {"num_gpus": num_gpus, "gpu_memory": None}
        return options

    def _own(self, context: Context) -> Mapping[str, Any]:
        """Return this client's own options."""
        if callable(self._resources):
            try:
                own = self._resources(context)
            except Exception as error:
                raise ConfigError(
                    f"the function given to gpu_mod as resources raised {text_of(error)}. It gets the "
                    f"client's Context, here with the node config {dict(context.node_config)}"
                ) from error
            return _checked(own)
        if self._resources is None:
            return {}
        partition = context.node_config.get(PARTITION_KEY)
        if partition is None:
            raise ConfigError(
                f"resources of gpu_mod is a table by {PARTITION_KEY}, and this node's config has none: give "
                f"it (--node-config '{PARTITION_KEY}=0'), or use a function of the Context"
            )
        return self._resources.get(str(partition), {})


@overload
def gpu_mod(*, resources: Resources | None = None, **options: Unpack[CallOptions]) -> GPUMod: ...
@overload
def gpu_mod(message: Message, context: Context, call_next: ClientAppCallable, /) -> Message: ...
def gpu_mod(*call: Any, resources: Resources | None = None, **options: Any) -> Any:
    """Run the functions of a ``ClientApp`` in workers that hold a lease on a GPU and then exit.

    Give it as the last of the app's mods, so that it is the innermost one: what the others do needs no GPU.

    Parameters
    ----------
    resources : callable or mapping, optional
        What a client has of its own: a function of its ``Context`` that returns options as below, or a table
        of these by ``partition-id``. None, or no entry: the options given here. The node's operator has the
        last word: ``num-gpus`` and ``gpu-memory``, ``gpu`` and ``gpu-ids`` in the node config.
    **options
        How the calls run, and how much of a GPU they get: see :class:`flower_gpu.CallOptions`; all but
        ``context``. None is needed: ``mods=[gpu_mod]`` is the same as ``mods=[gpu_mod()]``.

    Returns
    -------
    GPUMod
        The mod.

    Raises
    ------
    TypeError
        If there is no such option, or a value has the wrong type.
    ConfigError
        If a value cannot be used.

    Notes
    -----
    The worker gets message and ``Context`` and gives back the reply and ``context.state``; everything else
    that the function changes is gone with the worker. After a failed call the state is what it was before.

    Examples
    --------
    >>> app = ClientApp(mods=[gpu_mod(gpu_memory="2GiB")])
    >>> @app.train()
    ... def train(message: Message, context: Context) -> Message: ...
    """
    if len(call) == 3:  # given to the app without brackets, and called by Flower
        return GPUMod(resources, options)(*call)
    if call:
        raise TypeError(f"gpu_mod takes keyword arguments only, such as num_gpus=0.5, not {call[0]!r}")
    return GPUMod(resources, options)


def mod_options(app: ClientApp) -> dict[str, Callable[[Context], dict[str, Any]]]:
    """Return what an app's mods say of a client, given its Context, by message type; "" is any type.

    Flower has no public way to an app's functions. Where it keeps them elsewhere, nothing is found.
    """
    functions: dict[str, Any] = {
        kind.removesuffix(".default"): function
        for kind, function in getattr(app, "_registered_funcs", {}).items()
    }
    if (function := getattr(app, "_call", None)) is not None:  # of a client_fn
        functions = {"": function}
    found: dict[str, Callable[[Context], dict[str, Any]]] = {}
    for kind, function in functions.items():
        for mod, rest in _inner(function):  # the innermost one is the last
            if isinstance(mod, GPUMod):
                found[kind] = partial(mod.options_of, call_next=rest)
    return found


def function_without_mods(app: ClientApp, message_type: str) -> Any:
    """Return the app's own function for messages of a type, or None if more than the function must run.

    That is the case for an app with a lifespan function or with other mods than ``gpu_mod``, which does
    nothing in a worker. None also where Flower keeps its functions elsewhere.
    """
    name = message_type if "." in message_type else f"{message_type}.default"
    function = getattr(app, "_registered_funcs", {}).get(name)
    for mod, rest in _inner(function):
        if not _is_ours(mod):
            return None
        function = rest
    return function if _lifespan_of(app) is None else None


def _checked(own: Any) -> Mapping[str, Any]:
    if own is None:
        return {}
    if not isinstance(own, Mapping):
        raise TypeError(
            f'resources of gpu_mod must give options such as {{"num_gpus": 0.5}}, or None, not {own!r}'
        )
    return own


def _inner(function: Any) -> Iterator[tuple[Any, Any]]:
    """Go through what Flower has wrapped around a function: each time the mod, if it is one, and the rest."""
    while isinstance(function, FunctionType) and function.__module__.startswith("flwr."):
        names = function.__code__.co_freevars
        cells = dict(zip(names, function.__closure__ or (), strict=True))
        inner = cells.get("_ffn") or cells.get("client_fn")
        if inner is None:
            return
        function = inner.cell_contents
        yield cells["_mod"].cell_contents if "_mod" in cells else None, function


def _is_ours(mod: Any) -> bool:
    return mod is gpu_mod or isinstance(mod, GPUMod)


def _innermost(function: Any) -> Any:
    """Return the user's own function."""
    for _, inner in _inner(function):
        function = inner
    return function


def _name(function: Any) -> str:
    """Return the name of the user's own function, by which its footprint is known."""
    return task_key(_innermost(function))


_Lifespan = Callable[[Context], AbstractContextManager[None]]


class _Rest:
    """What follows in the chain of mods, with the app's lifespan function where a worker needs that.

    A fork has what the lifespan function did in the caller. A process that it had to be pickled for has not,
    and runs it again.
    """

    def __init__(self, function: ClientAppCallable, lifespan: _Lifespan | None, is_fork: bool = True) -> None:
        self._function = function
        self._lifespan = lifespan
        self._is_fork = is_fork

    def __call__(self, message: Message, context: Context) -> Message:
        if self._lifespan is None or self._is_fork:
            return self._function(message, context)
        with self._lifespan(context):
            return self._function(message, context)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Rest, (self._function, self._lifespan, False)


def _lifespan() -> _Lifespan | None:
    """Return the lifespan function of the app that is being called; None where it has none."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is ClientApp.__call__.__code__:
            return _lifespan_of(frame.f_locals["self"])
    return None


def _lifespan_of(app: ClientApp) -> _Lifespan | None:
    found: _Lifespan | None = getattr(app, "_lifespan", None)
    return None if found is find(EMPTY_LIFESPAN) else found
