"""The private names of Flower that this package uses, and the effect if a name is missing.

A lookup returns None if the installed Flower has no such name. Then Flower's own code runs unchanged, and the
log says so once, at level DEBUG. `flower-gpu doctor` lists the names that the installed Flower lacks.
"""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any, Final

from flower_gpu.flower import distribution

UTILS: Final = "flwr.supercore.inflatable.inflatable_utils"
RUNTIME_HANDLERS: Final = "flwr.superlink.servicer.runtime.runtime_handlers"
FLEET_HANDLERS: Final = "flwr.superlink.servicer.fleet.fleet_handlers"
NODE_HANDLERS: Final = "flwr.supernode.servicer.runtime.runtime_handlers"
NODE_LOOP: Final = "flwr.supernode.start_client_internal"
NODE_STATE: Final = "flwr.supernode.nodestate.in_memory_nodestate:InMemoryNodeState"
OBJECT_STORE: Final = "flwr.supercore.object_store.in_memory_object_store:InMemoryObjectStore"
LINK_STATES: Final = (
    "flwr.server.superlink.linkstate.in_memory_linkstate:InMemoryLinkState",
    "flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState",
)
SERVER_RUNTIME: Final = "flwr.superlink.runtime.run_serverapp"
HTTP_GRID: Final = "flwr.superlink.grid.http_grid"
SUPEREXEC: Final = "flwr.supercore.superexec.run_superexec"
HEARTBEAT_INTERVALS: Final = (
    "flwr.supercore.heartbeat:HEARTBEAT_DEFAULT_INTERVAL",
    "flwr.supernode.fleet_http_connection:HEARTBEAT_DEFAULT_INTERVAL",
)
#: Modules of Flower that draw from Python's generator at random times.
GENERATORS: Final = (
    f"{UTILS}:random",
    "flwr.supercore.heartbeat:random",
    "flwr.supercore.retry.retry_invoker:random",
)
CLIENT_RUNTIME: Final = "flwr.supernode.runtime.run_clientapp"
INSTALLER: Final = "flwr.cli.install:validate_and_install"
EMPTY_LIFESPAN: Final = "flwr.clientapp.client_app:_empty_lifespan"
DEFAULT_SUPERLINK: Final = "flwr.supercore.constant:SUPERLINK_DEFAULT_CLIENT_ADDRESS"
DEFAULT_SUPERNODE: Final = "flwr.supercore.constant:SUPERNODE_DEFAULT_CLIENT_ADDRESS"

_ALONE: Final = "each object of a message travels in a request of its own"
_ASKS: Final = "a SuperNode looks for messages and replies at Flower's intervals"
_SILENT: Final = "the server is not told of an app that gives no reply, and no message can have a lease"

#: The effect of a missing name, by ``module:attribute``. The names exist in flwr 1.40 to 1.43.
NAMES: Final = {
    **{f"{UTILS}:{name}": _ALONE for name in ("pull_objects", "push_object_contents_from_iterable")},
    f"{UTILS}:pull_and_inflate_object_from_tree": "a request that comes before its object waits for a second",
    f"{UTILS}:ObjectPullError": _ALONE,
    **{
        f"{handlers}:{name}": _ALONE
        for handlers in (RUNTIME_HANDLERS, FLEET_HANDLERS, NODE_HANDLERS)
        for name in ("pull_object", "push_object")
    },
    f"{NODE_LOOP}:time": _ASKS,
    **{f"{NODE_STATE}.{name}": _ASKS for name in ("create_task", "delete_messages", "store_message")},
    f"{OBJECT_STORE}.put": _ASKS,
    **{
        f"{state}.{name}": "a SuperLink's SuperExec asks for runs at Flower's interval"
        for state in LINK_STATES
        for name in ("create_run", "create_task")
    },
    f"{HTTP_GRID}:time": "a ServerApp looks for replies every 3 s",
    f"{SUPEREXEC}:time": "a SuperExec asks for tasks at Flower's interval",
    f"{SUPEREXEC}:start_parent_process_monitor": "a SuperExec looks for its parent five times a second",
    **dict.fromkeys(HEARTBEAT_INTERVALS, "a SuperNode's heartbeats come at Flower's interval"),
    **dict.fromkeys(GENERATORS, "a seed in the ServerApp alone does not decide which clients are asked"),
    f"{CLIENT_RUNTIME}:get_load_client_app_fn": _SILENT,
    f"{SERVER_RUNTIME}:run_": "a ServerApp that exits fails its run a minute later, without a reason",
    **{
        f"{runtime}:install_app_dependencies": "each message installs the dependencies of its app again"
        for runtime in (CLIENT_RUNTIME, SERVER_RUNTIME)
    },
    INSTALLER: "a confined app could be installed anywhere, so none is",
    EMPTY_LIFESPAN: "a lifespan function runs in each worker of gpu_mod again; train_many gets lists of one",
    DEFAULT_SUPERLINK: "port 8000 is taken for a SuperLink's default",
    DEFAULT_SUPERNODE: "a second SuperNode without --port ends with a traceback, not with a sentence",
}

_log = logging.getLogger("flwr.flower_gpu")


def find(name: str) -> Any:
    """Return Flower's object with this name, or None. The name must be in :data:`NAMES`."""
    value = _find(name)
    if value is None:
        _say(name)
    return value


def lacking() -> dict[str, str]:
    """Return the names that the installed Flower lacks, each with the effect."""
    return {name: effect for name, effect in NAMES.items() if _find(name) is None}


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


@cache
def _say(name: str) -> None:
    _log.debug("%s has no %s: %s", distribution.described(), name.replace(":", "."), NAMES[name])
