"""What an app's own ``gpu_mod`` says of each client: asked once, before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from flwr.app import Context
from flwr.clientapp import ClientApp

from flower_gpu.apps.app_imports import is_more_than_listed
from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import call_settings
from flower_gpu.errors import ConfigError, text_of
from flower_gpu.flower.mod import mod_options
from flower_gpu.options import CALL, CPU_LEASES_VARIABLE
from flower_gpu.simulation.clients import RESOURCES
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.nodes import VirtualNodes

#: Options of each client, by message type; the type "" stands for all types.
ByType = Mapping[str, list[dict[str, Any]]]
_MOD: Final = "gpu_mod"


def ask(app: AppReference | ClientApp, nodes: VirtualNodes, options: Mapping[str, Any]) -> ByType:
    """Return what the app says of each client, by message type.

    ``options``: of the run's calls.

    Raises ConfigError if it says what cannot be used. Of an app that cannot be imported nothing is known: its
    messages fail, and tell why.
    """
    try:
        if isinstance(app, ClientApp):  # its functions are here already
            return _told(app, nodes)
        if not is_more_than_listed(app.folder, app.name.partition(":")[0], _MOD):
            return {}
        # It imports the app's modules, which this process must not have, and waits for nobody.
        env = {**(options.get("env") or {}), CPU_LEASES_VARIABLE: "off", CALL["gpu"].variable: "never"}
        settings = call_settings({"start_method": options.get("start_method"), "env": env})
        told: ByType = run_call(_told, (app, nodes), settings=settings, kind="asking gpu_mod")
    except (ConfigError, TypeError) as error:
        raise ConfigError(
            f"{_MOD} of the app: {text_of(error)}. A simulation asks it once for each client, before the "
            "first message, when context.state is empty"
        ) from error
    except Exception:
        return {}
    return told


def _told(app: AppReference | ClientApp, nodes: VirtualNodes) -> ByType:
    """Ask an app; one that is imported for this in a worker."""
    loaded = app.load() if isinstance(app, AppReference) else app
    checked: set[str] = set()

    def options_of(ask_mod: Callable[[Context], Mapping[str, Any]], node_id: int) -> dict[str, Any]:
        options = ask_mod(nodes.context_of(node_id, b""))
        if repr(options) not in checked:
            call_settings(options)
            checked.add(repr(options))
        found = {name: options[name] for name in RESOURCES if options.get(name) is not None}
        if found.get("gpu") != "never":  # what it asks of its nodes is not for a machine that plays them
            found.pop("gpu", None)
        return found

    asked = mod_options(loaded).items()
    return {kind: [options_of(ask_mod, node_id) for node_id in nodes.ids] for kind, ask_mod in asked}
