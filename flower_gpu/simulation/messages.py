"""How a message to a virtual node is handled: in a worker with a lease, which loads the app."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.supercore.object_ref import load_app

from flower_gpu.calls.options import CallSettings
from flower_gpu.flower import message_call
from flower_gpu.simulation.nodes import VirtualNodes


@dataclass(frozen=True)
class AppReference:
    """A ClientApp that workers import.

    Parameters
    ----------
    folder : Path
        The app's folder, which goes first on ``sys.path``.
    name : str
        ``"package.module:attribute"``.
    """

    folder: Path
    name: str

    def load(self) -> ClientApp:
        """Import it.

        Raises
        ------
        LoadClientAppError
            If that fails, or it is something else.
        """
        app = load_app(self.name, LoadClientAppError, self.folder)
        if not isinstance(app, ClientApp):
            raise LoadClientAppError(f"{self.name} is a {type(app).__name__}, not a ClientApp")
        return app


@dataclass(frozen=True)
class Handler:
    """Handles messages of one run.

    Parameters
    ----------
    app : AppReference or ClientApp
        What handles them in a worker.
    nodes : VirtualNodes
        Whose messages these are.
    options : mapping
        Of each call, as for :class:`flower_gpu.CallOptions`.
    name : str
        By which the footprint of the app's calls is known.
    """

    app: AppReference | ClientApp
    nodes: VirtualNodes
    options: Mapping[str, Any]
    name: str

    def __call__(self, message: Message) -> Message:
        """Have a worker handle a message; the node keeps what that did to its state."""
        context = self.nodes.context_of(message.metadata.dst_node_id)
        partition = str(self.nodes.partition_of(context.node_id))
        reply = message_call.call(
            handle,
            (self.app,),
            message,
            context,
            lambda: CallSettings.resolve({**self.options, "context": context}, name=partition),
            name=self.name,
            passed_on=(LoadClientAppError,),
        )
        self.nodes.keep(context)
        return reply


def handle(
    app: AppReference | ClientApp, message: Message, context: Context, identity: Mapping[str, Any]
) -> tuple[Message, RecordDict]:
    """Handle a message; runs in a worker."""
    loaded = app.load() if isinstance(app, AppReference) else app
    return message_call.run(loaded, None, message, context, identity)
