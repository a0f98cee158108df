"""Settings of single clients: their share of a GPU, cores, time limit, speed and availability.

The settings come from a table with entries by partition. If two entries name the same client, the later entry
overrides the earlier one, key by key. The app's own ``gpu_mod`` is asked once for each client before the run
begins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Protocol

from flwr.app import Context
from flwr.clientapp import ClientApp

from flower_gpu.apps.app_imports import is_more_than_listed
from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import CallSettings, call_settings
from flower_gpu.errors import ConfigError, text_of
from flower_gpu.flower.mod import mod_options
from flower_gpu.kinds import FACTOR, PART, Kind
from flower_gpu.options import CALL, CPU_LEASES, GivenValue, joined
from flower_gpu.simulation.in_worker import AppReference

#: The options of calls that can be set for a single client.
RESOURCES: Final = ("gpu", "num_gpus", "gpu_memory", "gpu_compute", "num_cpus", "timeout_s")
#: The keys of an entry, by their names in Python. ``slow_down``: factor on the duration of the client's
#: calls. ``availability``: fraction of the rounds in which the client is available.
KEYS: Final[Mapping[str, Kind | None]] = MappingProxyType(
    {**{name: CALL[name].kind for name in RESOURCES}, "slow_down": FACTOR, "availability": PART}
)
_PART: Final = re.compile(r"(?:\*|(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?)(?:/(?P<step>\d{1,9}))?")
_TABLE: Final = "table of clients"

#: The settings of one client: values by :data:`KEYS`.
ClientOverrides = Mapping[str, Any]
_NOTHING: Final[ClientOverrides] = {}


@dataclass(frozen=True)
class Clients:
    """The settings of all clients of a run.

    ``by_type``: settings by message type, in the order of partitions. The key "" holds the table's settings,
    for all types without an entry. Clients with equal settings share one mapping.
    """

    by_type: Mapping[str, tuple[ClientOverrides, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Mapping[Any, Any], count: int) -> Clients:
        """Return the settings in a table of clients.

        ``entries``: the table, with patterns of partitions as keys.
        ``count``: number of clients.

        Raises ConfigError if a pattern, a client, a key or a value cannot be used.
        """
        if not isinstance(entries, Mapping):
            raise TypeError(f"clients must be a mapping by partition, not a {type(entries).__name__}")
        overrides: list[ClientOverrides] = [_NOTHING] * count
        for pattern, entry in entries.items():
            values = _values(pattern, entry)
            for partition in _partitions(pattern, count):
                overrides[partition] = joined(overrides[partition], values)
        return cls({"": _shared(overrides)} if entries else {})

    def with_app(
        self, of_app: Mapping[str, Sequence[ClientOverrides]], options: Mapping[str, Any]
    ) -> Clients:
        """Return these settings joined with the app's settings.

        The options of the run and the table take precedence over the app.

        ``of_app``: settings of each client by message type, see :func:`overrides_of_app`.
        ``options``: options of the run's calls.
        """
        overridden = {name for name, value in options.items() if value is not None}
        overridden |= {
            name for name in RESOURCES if CALL[name].is_nodes and os.environ.get(CALL[name].variable)
        }
        overridden |= {CALL[name].excludes for name in overridden}

        def with_table(partition: int, overrides: ClientOverrides) -> ClientOverrides:
            remaining = {name: value for name, value in overrides.items() if name not in overridden}
            return joined(remaining, self.of_client(partition))

        from_app = {
            kind: _shared(
                with_table(partition, overrides) for partition, overrides in enumerate(all_overrides)
            )
            for kind, all_overrides in of_app.items()
        }
        return Clients({**self.by_type, **from_app})

    def of_client(self, partition: int, message_type: str = "") -> ClientOverrides:
        """Return the settings of a client for calls of a message type."""
        default = self.by_type.get("", ())
        overrides = self.by_type.get(message_type.removesuffix(".default"), default)
        return overrides[partition] if overrides else _NOTHING

    def differ(self, message_type: str) -> bool:
        """Return True if clients must be handled one by one: options differ, or clients are slowed down."""
        all_overrides = self.by_type.get(message_type.removesuffix(".default"), self.by_type.get("", ()))
        return len({id(overrides) for overrides in all_overrides}) > 1 or any(
            "slow_down" in overrides for overrides in all_overrides[:1]
        )

    def resources(self) -> list[dict[str, Any]]:
        """Return the distinct options of calls among the clients' settings."""
        all_overrides = {
            id(overrides): overrides for of_type in self.by_type.values() for overrides in of_type
        }
        by_key = {_key(options): options for options in map(resources, all_overrides.values())}
        return list(by_key.values()) or [{}]


def settings_of(settings: CallSettings, overrides: ClientOverrides) -> CallSettings:
    """Return the settings of a client's calls, derived from the settings of the run's calls."""
    options = resources(overrides)
    if "gpu" in options:
        # Otherwise the environment variable of this process would override the client's value.
        options["env"] = {**settings.worker.env, CALL["gpu"].variable: options["gpu"]}
    return replace(settings.derived(options), client_overrides=as_written(overrides))


def resources(overrides: ClientOverrides) -> dict[str, Any]:
    """Return the options of calls among a client's settings."""
    return {name: overrides[name] for name in RESOURCES if name in overrides}


def _shared(all_overrides: Iterable[ClientOverrides]) -> tuple[ClientOverrides, ...]:
    """Return the settings with a single mapping for clients with equal settings."""
    overrides_by_key: dict[tuple[Any, ...], ClientOverrides] = {}
    return tuple(overrides_by_key.setdefault(_key(overrides), overrides) for overrides in all_overrides)


def _key(overrides: ClientOverrides) -> tuple[Any, ...]:
    return tuple(sorted(overrides.items()))


def as_written(overrides: ClientOverrides) -> dict[str, Any]:
    """Return a client's settings with keys as in a file."""
    return {name.replace("_", "-"): value for name, value in overrides.items()}


def plain(entries: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """Return a table of clients with keys as in a file."""
    return {str(pattern): as_written(entry) for pattern, entry in entries.items()}


def _values(pattern: Any, entry: Any) -> dict[str, Any]:
    """Return the values of a table's entry, by their names in Python."""
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{_TABLE}: {pattern!r} is {entry!r}, and must be a table: write keys below a heading such as "
            '["*"], ["0-9"] or [7]'
        )
    values: dict[str, Any] = {}
    for key, value in entry.items():
        source = f'{_TABLE}: ["{pattern}"] {key}'
        name = str(key).replace("-", "_")
        if name not in KEYS:
            known = ", ".join(known_name.replace("_", "-") for known_name in KEYS)
            raise ConfigError(f"{source}: there is no such key; there are {known}")
        others = {name, CALL[name].excludes if name in CALL else ""} & values.keys()
        if others:
            written = others.pop().replace("_", "-")
            raise ConfigError(f"{source}: {written} is given as well; give one of the two")
        # In a configuration, a value of a wrong type is a ConfigError and not a TypeError.
        read = GivenValue(value, KEYS[name], 0, source, is_config=True).read()
        values[name] = value if isinstance(value, int | float | str) else read
    return values


def _partitions(pattern: Any, count: int) -> Iterator[int]:
    """Yield the partitions that match a pattern: "7", "0-9", "*", "*/4", or several with commas."""
    named = f'{_TABLE}: "{pattern}" names'
    for part in str(pattern).split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{named} no clients. Write a partition such as 7, a range such as 0-9, or * for all; with "
                "/4 every 4th of them; several of these with commas between them"
            )
        first = int(match["first"] or 0)
        last = int(match["last"] or match["first"] or count - 1)
        step = int(match["step"] or 1)
        if last < first or step < 1:
            raise ConfigError(f"{named} no clients: a range goes up, and /1 is the smallest step")
        if last >= count:
            raise ConfigError(
                f"{named} client {last}, and there are {count}, from 0 to {count - 1}. Change it, or give "
                "more clients (--num-supernodes)"
            )
        yield from range(first, last + 1, step)


class NodeContexts(Protocol):
    """The part of :class:`.VirtualNodes` that asking an app needs."""

    ids: Sequence[int]

    def context_of(self, node_id: int, state: bytes) -> Context:
        """Return the context of a node."""


def overrides_of_app(
    app: AppReference | ClientApp, nodes: NodeContexts, options: Mapping[str, Any]
) -> Mapping[str, Sequence[ClientOverrides]]:
    """Return the settings that the app's own ``gpu_mod`` has for each client, by message type.

    The type "" stands for all types. The result is empty if the app cannot be imported, because its messages
    will fail and say why.

    ``options``: options of the run's calls.

    Raises ConfigError if a setting cannot be used.
    """
    try:
        # The functions of a ClientApp are in this process already.
        if isinstance(app, ClientApp):
            return _ask_app(app, nodes)
        if not is_more_than_listed(app.folder, app.name.partition(":")[0], "gpu_mod"):
            return {}
        # A worker asks the app, because this process must not import the app's modules. The worker needs no
        # lease, so it waits for no other process.
        env = {**(options.get("env") or {}), CPU_LEASES.variable: "off", CALL["gpu"].variable: "never"}
        settings = call_settings({"start_method": options.get("start_method"), "env": env})
        of_app: Mapping[str, Sequence[ClientOverrides]] = run_call(
            _ask_app, (app, nodes), settings=settings, kind="asking gpu_mod"
        )
        return of_app
    except (ConfigError, TypeError) as error:
        raise ConfigError(
            f"gpu_mod of the app: {text_of(error)}. A simulation asks it once for each client, before the "
            "first message, when context.state is empty"
        ) from error
    except Exception:
        return {}


def _ask_app(app: AppReference | ClientApp, nodes: NodeContexts) -> Mapping[str, Sequence[ClientOverrides]]:
    """Return the settings of each client from the app's ``gpu_mod``. Imports the app if necessary."""
    checked: set[str] = set()

    def options_of(ask_mod: Callable[[Context], Mapping[str, Any]], node_id: int) -> ClientOverrides:
        options = ask_mod(nodes.context_of(node_id, b""))
        if repr(options) not in checked:
            call_settings(options)
            checked.add(repr(options))
        overrides = {name: value for name, value in resources(options).items() if value is not None}
        # The app requires a GPU of real nodes. A machine that simulates nodes need not have one.
        if overrides.get("gpu") != "never":
            overrides.pop("gpu", None)
        return overrides

    mods = mod_options(app.load() if isinstance(app, AppReference) else app).items()
    return {kind: [options_of(ask_mod, node_id) for node_id in nodes.ids] for kind, ask_mod in mods}
