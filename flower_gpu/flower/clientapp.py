"""Flower's ``flwr-clientapp`` with one thing changed: the app is loaded and run in a worker with a lease.

The process that talks to the SuperNode (pulls the message, installs the app, pushes the reply) runs no code
of the app. So it is there to report what became of it: killed, timed out, out of memory.
"""

from __future__ import annotations

import sys
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn

from flower_gpu.calls.options import CallSettings
from flower_gpu.flower import message_call, mod_call

_COMMAND = "flwr-clientapp"


def main(arguments: list[str]) -> int:
    """Handle one message; return the exit status.

    Parameters
    ----------
    arguments : list of str
        Those of ``flwr-clientapp``.
    """
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp as runtime

    sys.argv = [_COMMAND, *arguments]
    runtime.get_load_client_app_fn = _get_load_client_app_fn
    try:
        flwr_clientapp()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _get_load_client_app_fn(**where: Any) -> Any:
    def load(*app: str) -> LeasedClientApp:
        return LeasedClientApp(where, app)

    return load


class LeasedClientApp:
    """Stands for an app that has not been loaded: not in this process.

    Parameters
    ----------
    where : dict
        Arguments of Flower's ``get_load_client_app_fn``.
    app : tuple of str
        Id, version and hash of the app.
    """

    def __init__(self, where: dict[str, Any], app: tuple[str, ...]) -> None:
        self._where = where
        self._app = app

    def __call__(self, message: Message, context: Context) -> Message:
        """Load and run the app in a worker."""
        return message_call.call(
            run_app,
            ((self._where, self._app),),
            message,
            context,
            lambda: CallSettings.resolve({"context": context}, name=message_call.client_of(context)),
            name=self._app[0],
            passed=(LoadClientAppError,),
        )


def run_app(
    app: tuple[dict[str, Any], tuple[str, ...]], message: Message, context: Context, identity: dict[str, Any]
) -> tuple[Message, RecordDict]:
    """Load an app and have it handle a message; runs in a worker."""
    where, names = app
    return mod_call.run(get_load_client_app_fn(**where)(*names), message, context, identity, None)
