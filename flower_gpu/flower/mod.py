"""One line that gives an existing ``ClientApp`` leases, caps, isolation and device policy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, Unpack, overload

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from flower_gpu.calls.options import CallOptions, CallSettings
from flower_gpu.errors import ClientCallError, ConfigError, FlowerGPUError
from flower_gpu.flower import arrays as arrays  # messages and contexts hold Flower's Array
from flower_gpu.flower import mod_call
from flower_gpu.gpu import lease
from flower_gpu.isolation import start
from flower_gpu.isolation.call import task_name
from flower_gpu.runner import run_call

#: Options of the calls of one client, by its Context; or a table of them by its ``partition-id``.
Resources = Callable[[Context], Mapping[str, Any] | None] | Mapping[Any, Mapping[str, Any]]

_PARTITION = "partition-id"
# With these a call begins with all that the client's own process has.
_INHERITING = ("fork", "inline", "in-process")


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
        CallSettings.resolve(options)  # what cannot be used is said where it is written
        self._resources = resources
        self._options = dict(options)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Run what follows in a worker; called by Flower.

        Raises
        ------
        FlowerGPUError
            If there was no GPU or worker for it, or it failed. Flower makes an error message of it.
        """
        if lease.VARIABLE in os.environ or any(_is_ours(mod) for mod, _ in _inner(call_next)):
            # In a worker already, or the function has a mod of its own, which knows better what it needs.
            return call_next(message, context)
        settings = self._settings(context)
        kind = message.metadata.message_type
        lifespan = None
        if (
            start.choose(settings.worker.start_method, preload=bool(settings.worker.preload))
            not in _INHERITING
        ):
            lifespan = _lifespan()
        records = message.content.array_records.values() if message.has_content() else ()
        try:
            reply: Message
            reply, state = run_call(
                mod_call.run,
                (call_next, message, context, mod_call.identity(), lifespan),
                settings=settings,
                kind=kind,
                name=_name(call_next),
                arrays=[array for record in records for array in record.values()],
                config=_config(message),
            )
        except FlowerGPUError:
            raise
        except Exception as error:
            # Flower tells the server nothing but this text: not which of the clients it was.
            client = settings.worker.name
            raise ClientCallError(f"{kind} of client {client}: {type(error).__name__}: {error}") from error
        mod_call.take_over(context.state, state)
        return reply

    def _settings(self, context: Context) -> CallSettings:
        options = {**self._options, **self._own(context), "context": context}
        partition = context.node_config.get(_PARTITION)
        return CallSettings.resolve(options, name=str(context.node_id if partition is None else partition))

    def _own(self, context: Context) -> Mapping[str, Any]:
        """Return what this client has of its own."""
        if callable(self._resources):
            own: Any = self._resources(context)
        elif self._resources is not None:
            partition = context.node_config.get(_PARTITION)
            if partition is None:
                raise ConfigError(
                    f"resources of gpu_mod is a table by {_PARTITION}, and this node's config has none: "
                    f"give it (--node-config '{_PARTITION}=0'), or use a function of the Context"
                )
            own = self._resources.get(partition)
        else:
            own = None
        if own is None:
            return {}
        if not isinstance(own, Mapping):
            raise TypeError(
                f'resources of gpu_mod must give options such as {{"num_gpus": 0.5}}, or None, not {own!r}'
            )
        return own


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
        last word: ``num-gpus`` and ``gpu-memory``, ``gpu`` and ``gpu-num`` in the node config.
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
    if call:
        message, context, call_next = call
        return GPUMod(resources, options)(message, context, call_next)
    return GPUMod(resources, options)


def _config(message: Message) -> dict[str, Any]:
    records = message.content.config_records.values() if message.has_content() else ()
    return {key: value for record in records for key, value in record.items()}


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


def _name(function: Any) -> str:
    """Return the name of the user's own function, by which its footprint is known."""
    for _, inner in _inner(function):
        function = inner
    return f"{getattr(function, '__module__', '')}:{task_name(function)}"


def _lifespan() -> Callable[[Context], AbstractContextManager[None]] | None:
    """Return the lifespan function of the app that is being called; None where it has none."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is ClientApp.__call__.__code__:
            found = getattr(frame.f_locals["self"], "_lifespan", None)
            return None if getattr(found, "__name__", "") == "_empty_lifespan" else found
    return None
