"""A Flower mod that adds leases, memory caps, isolation and a device policy to an existing ``ClientApp``."""

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

#: A function that returns the options of a client's calls, given its Context; or a table by ``partition-id``.
Resources = Callable[[Context], Mapping[str, Any] | None] | Mapping[Any, Mapping[str, Any]]


class GPUMod:
    """The Flower mod that :func:`gpu_mod` returns."""

    def __init__(self, resources: Resources | None, options: Mapping[str, Any]) -> None:
        if "context" in options:
            raise TypeError("gpu_mod has no option 'context': each message brings its own")
        if not (resources is None or callable(resources) or isinstance(resources, Mapping)):
            raise TypeError(
                "resources must be a function of the Context or a table by partition-id, not a "
                f"{type(resources).__name__}"
            )
        self._resources = resources
        if isinstance(resources, Mapping):
            self._resources = {str(partition): _checked(entry) for partition, entry in resources.items()}
        # Resolved here, so that the traceback of an error points to the line with the wrong option.
        self._options = dict(options)
        self._settings = call_settings(self._options)
        for entry in self._resources.values() if isinstance(self._resources, Mapping) else ():
            self._settings.derived(entry)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Run the next mod or the function in a worker; called by Flower.

        Raises
        ------
        FlowerGPUError
            If no GPU or worker was available, or the call failed. Flower turns it into an error message.
        """
        if leasing.is_worker() or any(_is_ours(mod) for mod, _ in _inner(call_next)):
            # Either this is a worker already, or the function has its own gpu_mod, which takes precedence.
            return call_next(message, context)
        # An error in the app's resources counts as an error of the call.
        with message_call.named(message_call.label_of(message.metadata.message_type, [context])):
            settings = self._settings_of(context, call_next)
        return message_call.call(
            message_call.run,
            (_Rest(call_next, _lifespan()),),
            message,
            context,
            settings,
            name=_name(call_next),
        )

    def _settings_of(self, context: Context, call_next: ClientAppCallable) -> CallSettings:
        settings = self._settings.derived({**self.options_of(context, call_next), "context": context})
        return settings.for_client(message_call.client_of(context))

    def options_of(self, context: Context, call_next: ClientAppCallable) -> dict[str, Any]:
        """Return the options of a client's calls of a function.

        Raises ConfigError or TypeError if the app's resources for this client are not a mapping of options.
        """
        options = joined(self._options, self._client_options(context))
        num_gpus = getattr(_innermost(call_next), "num_gpus", None)
        if num_gpus is not None:  # the function was made with `distributed`
            options |= {"num_gpus": num_gpus, "gpu_memory": None}
        return options

    def _client_options(self, context: Context) -> Mapping[str, Any]:
        """Return the options that apply to this client only."""
        if callable(self._resources):
            try:
                options = self._resources(context)
            except Exception as error:
                raise ConfigError(
                    f"the function given to gpu_mod as resources raised {text_of(error)}. It gets the "
                    f"client's Context, here with the node config {dict(context.node_config)}"
                ) from error
            return _checked(options)
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

    Pass it as the last of the app's mods. Then it is the innermost mod, and the others run without a GPU.

    Parameters
    ----------
    resources : callable or mapping, optional
        Options of each client: a function of its ``Context`` that returns options as below, or a table of
        options by ``partition-id``. Without a value or an entry, a client gets the options given here. The
        node's operator can override them by ``num-gpus``, ``gpu-memory``, ``gpu`` and ``gpu-ids`` in the node
        config.
    **options
        How the calls run, and how much of a GPU they get: all of :class:`flower_gpu.CallOptions` except
        ``context``. All are optional: ``mods=[gpu_mod]`` is the same as ``mods=[gpu_mod()]``.

    Returns
    -------
    GPUMod
        The mod.

    Raises
    ------
    TypeError
        If an option does not exist, or a value has the wrong type.
    ConfigError
        If a value cannot be used.

    Notes
    -----
    The worker gets the message and the ``Context``, and returns the reply and ``context.state``. All other
    changes by the function are lost when the worker ends. After a failed call the state is unchanged.

    Examples
    --------
    >>> app = ClientApp(mods=[gpu_mod(gpu_memory="2GiB")])
    >>> @app.train()
    ... def train(message: Message, context: Context) -> Message: ...
    """
    if len(call) == 3:  # the app has mods=[gpu_mod] without parentheses, and Flower calls it
        return GPUMod(resources, options)(*call)
    if call:
        raise TypeError(f"gpu_mod takes keyword arguments only, such as num_gpus=0.5, not {call[0]!r}")
    return GPUMod(resources, options)


def mod_options(app: ClientApp) -> dict[str, Callable[[Context], dict[str, Any]]]:
    """Return functions from a client's Context to its options, by message type; "" stands for any type.

    Flower has no public API for an app's functions. In a version that stores them elsewhere, the result is
    empty.
    """
    functions: dict[str, Any] = {
        kind.removesuffix(".default"): function
        for kind, function in getattr(app, "_registered_funcs", {}).items()
    }
    if (function := getattr(app, "_call", None)) is not None:  # the app has a client_fn
        functions = {"": function}
    options: dict[str, Callable[[Context], dict[str, Any]]] = {}
    for kind, function in functions.items():
        for mod, rest in _inner(function):  # the innermost mod comes last and counts
            if isinstance(mod, GPUMod):
                options[kind] = partial(mod.options_of, call_next=rest)
    return options


def function_without_mods(app: ClientApp, message_type: str) -> Any:
    """Return the app's own function for messages of a type, or None if it must not run alone.

    An app with a lifespan function or with mods other than ``gpu_mod`` must run as a whole; ``gpu_mod`` has
    no effect in a worker. The result is also None if this version of Flower stores its functions elsewhere.
    """
    name = message_type if "." in message_type else f"{message_type}.default"
    function = getattr(app, "_registered_funcs", {}).get(name)
    for mod, rest in _inner(function):
        if not _is_ours(mod):
            return None
        function = rest
    return function if _lifespan_of(app) is None else None


def _checked(options: Any) -> Mapping[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(
            f'resources of gpu_mod must give options such as {{"num_gpus": 0.5}}, or None, not {options!r}'
        )
    return options


def _inner(function: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each of Flower's wrappers around a function as a pair: its mod or None, and the wrapped rest."""
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
    """Return the name of the user's own function, which is the key of its footprint."""
    return task_key(_innermost(function))


_Lifespan = Callable[[Context], AbstractContextManager[None]]


class _Rest:
    """The rest of the chain of mods, with the app's lifespan function if a worker needs it.

    A forked worker inherits the effects of the lifespan function from the caller. For any other worker this
    object is pickled, and the lifespan function runs again in the worker.
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
    """Return the lifespan function of the app that is being called, or None."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is ClientApp.__call__.__code__:
            return _lifespan_of(frame.f_locals["self"])
    return None


def _lifespan_of(app: ClientApp) -> _Lifespan | None:
    lifespan: _Lifespan | None = getattr(app, "_lifespan", None)
    return None if lifespan is find(EMPTY_LIFESPAN) else lifespan
