"""Flower's ``flwr-clientapp`` in a fork of the fork server (see the drawing in commands.py).

Where the node takes the leases, one thing is changed: the app is loaded and run in a worker with a lease. The
process that talks to the SuperNode (pulls the message, installs the app, pushes the reply) runs no code of
the app. So it can report the end of the worker: killed, timed out, out of memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.cli import install
from flwr.cli.config_utils import load_and_validate
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.config import get_metadata_from_config, get_project_config, get_project_dir
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from flower_gpu import trace
from flower_gpu.apps.app_exit import describe_exit, is_asked_by_flower
from flower_gpu.apps.app_imports import libraries_of
from flower_gpu.calls.settings import call_settings
from flower_gpu.errors import ClientCallError, ConfigError, encodable, text_of
from flower_gpu.flower import distribution, message_call
from flower_gpu.flower.private_names import CLIENT_RUNTIME, INSTALLER, find
from flower_gpu.flower.records import round_of
from flower_gpu.options import CALL
from flower_gpu.programs import environments
from flower_gpu.programs.confine import Allowed, for_message
from flower_gpu.programs.objects import ask_for_many
from flower_gpu.workers import call_end, methods, threads
from flower_gpu.workers import caller as worker
from flower_gpu.workers.call import Call
from flower_gpu.workers.confinement import Confinement
from flower_gpu.workers.forkserver import client

_OTHER_NAME = "flower-gpu flwr-clientapp"
_LOADER = "get_load_client_app_fn"  # Flower's function that loads an app
_LOADS = f"{CLIENT_RUNTIME}:{_LOADER}"
_INSTALLER = "validate_and_install"  # Flower's function that installs an unpacked app


def main(argv: list[str], with_lease: bool, is_fork: bool) -> int:
    """Handle one message, and return the exit status.

    ``argv``: name and arguments of ``flwr-clientapp``.
    ``with_lease``: True to run the app in a worker with a lease, False to run it in this process, as Flower
    does.
    ``is_fork``: True if this process is a fork of the fork server. Then its worker is one as well.
    Raises ConfigError if this version of Flower is not supported.
    """
    sys.argv = argv
    ask_for_many()
    is_confined = Allowed.from_environment(os.environ) is not None
    if is_confined:
        install_among_apps()
    environments.replace_installation(CLIENT_RUNTIME, is_confined=is_confined)
    loader = find(_LOADS)
    if with_lease and loader is None:
        raise _unknown("loads apps", "this message would have no lease")
    if loader is not None:
        get_load_fn = partial(_leased_loader, is_fork) if with_lease else partial(_loader, loader)
        setattr(run_clientapp, _LOADER, partial(_telling, get_load_fn))
    try:
        flwr_clientapp()
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        if end.code is not None:
            print(end.code, file=sys.stderr)
            return 1
    return 0


def install_among_apps() -> None:
    """Have this process install apps among the others only, and not in a place of their choice.

    Flower makes a path of an app's version, which the app says itself, and which may have slashes in it.

    Raises ConfigError if this version of Flower installs apps in another way.
    """
    known = find(INSTALLER)
    if known is None:
        raise _unknown("installs apps", "a confined app could be installed anywhere")
    setattr(install, _INSTALLER, partial(_checked_install, known))


def _checked_install(known: Callable[..., Path], folder: Path, *more: Any, **named: Any) -> Path:
    """Install an app that Flower has unpacked into a folder."""
    config, _ = load_and_validate(folder / "pyproject.toml", check_module=False)
    _folder_of(*get_metadata_from_config(config), "")
    return known(folder, *more, **named)


def _folder_of(*app: str) -> Path:
    folder = get_project_dir(*app)
    if folder.parent != get_project_dir("a/b", "1", "").parent:
        raise ConfigError(
            f"--confine: the name {app[0]!r} or the version {app[1]!r} of the app leads out of the folder of "
            "apps. The app was not run"
        )
    return folder


def _unknown(option: str, consequence: str) -> ConfigError:
    return ConfigError(
        f"{distribution.described()} {option} in another way than the versions that flower-gpu "
        f"knows, so {consequence}: install flwr 1.41, or a newer flower-gpu"
    )


def _telling(get_load_client_app_fn: Callable[..., Any], **loader_arguments: Any) -> Any:
    """Wrap the function that loads an app, so that failures are written into the trace of the run.

    Flower sends only the last line of an exception to the server. It sends nothing about an app that exits,
    or a function without a reply. Then the server would wait for ever.
    """
    load = get_load_client_app_fn(**loader_arguments)

    def load_telling(*app: str) -> Any:
        def handle(message: Message, context: Context) -> Message:
            checked = message_call.checker(message)  # before the app can change it
            try:
                try:
                    # Loaded here, since that may fail, too.
                    reply = load(*app)(message=message, context=context)
                except SystemExit as error:
                    if is_asked_by_flower(error):
                        raise
                    raise ClientCallError(describe_exit(error, "app")) from error
                message_call.check_texts(context.state, "context.state")
                return checked(reply)
            except Exception as error:
                trace.write(
                    "client_failed",
                    client=message_call.client_of(context),
                    node=context.node_id,
                    task=message.metadata.message_type.partition(".")[0],
                    round=round_of(message),
                    error=text_of(error),
                    traceback=call_end.traceback_of(error),
                )
                if _can_be_sent(error):
                    raise
                raise ClientCallError(text_of(error)) from error

        return handle

    return load_telling


def _can_be_sent(error: Exception) -> bool:
    """Return True if Flower can send the text of an exception: protobuf takes no lone surrogates."""
    try:
        text = str(error)
    except Exception:
        return False
    return encodable(text) == text


def _leased_loader(is_fork: bool, **loader_arguments: Any) -> Any:
    return lambda *app: LeasedClientApp(loader_arguments, app, is_fork)


def _loader(get_load_client_app_fn: Callable[..., Any], **loader_arguments: Any) -> Any:
    load = get_load_client_app_fn(**loader_arguments)

    def load_where_its_packages_are(*app: str) -> Any:
        # This process may have libraries already that its environment has in other versions.
        return (
            load(*app) if environments.used() is None else partial(_handle_elsewhere, loader_arguments, app)
        )

    return load_where_its_packages_are


def _handle_elsewhere(
    loader_arguments: dict[str, Any], app: tuple[str, ...], *, message: Message, context: Context
) -> Message:
    """Have an app that takes no lease handle a message in a fork of its environment's fork server."""
    _learn_imports(app)
    env = threads.environment(threads.planned_threads(os.environ), {})
    args = (loader_arguments, app, message, context, message_call.identity())
    call = Call(load_and_run, args, env=env, setup=threads.SETUP, label=app[0])
    reply: Message
    reply, state = worker.run(call, methods.FORKSERVER, otherwise=methods.SPAWN)
    message_call.take_over(context.state, state)
    return reply


class LeasedClientApp:
    """Takes the place of an app that is loaded in a worker only, and not in this process."""

    def __init__(self, loader_arguments: dict[str, Any], app: tuple[str, ...], is_fork: bool) -> None:
        self._loader_arguments = loader_arguments  # arguments of Flower's get_load_client_app_fn
        self._app = app  # id, version and hash
        self._is_fork = is_fork

    def __call__(self, message: Message, context: Context) -> Message:
        """Load the app in a worker, and let it handle a message there."""
        if self._is_fork:
            _learn_imports(self._app)
            # A process with the name flwr-clientapp would be forked for its call. This one must not be,
            # because it lacks the app's libraries.
            sys.argv[0] = _OTHER_NAME
        with message_call.named(message_call.label_of(message.metadata.message_type, [context])):
            settings = call_settings({"context": context}).for_client(message_call.client_of(context))
        with self._confined() as confinement:
            return message_call.call(
                load_and_run,
                (self._loader_arguments, self._app),
                message,
                context,
                settings.with_worker(confinement=confinement),
                name=self._app[0],
            )

    def _confined(self) -> AbstractContextManager[Confinement | None]:
        """Return a context with the confinement of the worker of a message, or with None."""
        allowed = Allowed.from_environment(os.environ)
        if allowed is None:
            return nullcontext()
        return for_message(allowed, [str(_folder_of(*self._app))], environments.used() or "")


def _learn_imports(app: tuple[str, ...]) -> None:
    """Let the fork server import the app's libraries once, instead of each worker of the first round."""
    # The worker reports errors of the app.
    with suppress(Exception):
        folder = Path(get_project_dir(*app))
        reference = get_project_config(folder)["tool"]["flwr"]["app"]["components"]["clientapp"]
        is_limited = CALL["timeout_s"].resolve(None, os.environ) is not None
        patience_s = client.LEARN_FOR_LIMITED_S if is_limited else client.LEARN_S
        names = libraries_of(folder, reference.partition(":")[0])
        # The fork server of an app's own environment has not imported this module yet.
        if environments.used() is not None:
            names = [__name__, *names]
        client.learn(names, patience_s=patience_s)


def load_and_run(
    loader_arguments: dict[str, Any],
    app: tuple[str, ...],
    message: Message,
    context: Context,
    identity: dict[str, Any],
) -> message_call.Handled:
    """Load an app and let it handle a message. Runs in a worker."""
    return message_call.run(get_load_client_app_fn(**loader_arguments)(*app), message, context, identity)
