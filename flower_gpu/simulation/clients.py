"""What single clients of a run have of their own: a share of a GPU, cores, a time limit; how slow they are.

A table has entries by partition; of two that name the same client, the later one counts, key by key. What an
app's own ``gpu_mod`` says of each client is asked once, before the run begins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from flwr.app import Context
from flwr.clientapp import ClientApp

from flower_gpu.apps.app_imports import is_more_than_listed
from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import call_settings
from flower_gpu.errors import ConfigError, text_of
from flower_gpu.flower.mod import mod_options
from flower_gpu.kinds import FACTOR, PART, Kind
from flower_gpu.options import CALL, CPU_LEASES, GivenValue, joined
from flower_gpu.simulation.in_worker import AppReference

if TYPE_CHECKING:
    from flower_gpu.simulation.nodes import VirtualNodes

#: The options of calls that a client can have of its own.
RESOURCES: Final = ("gpu", "num_gpus", "gpu_memory", "gpu_compute", "num_cpus", "timeout_s")
#: The keys of an entry, by their names in Python. ``slow_down``: how many times as long each of its calls
#: takes. ``availability``: in which part of the rounds it can be asked.
KEYS: Final[Mapping[str, Kind | None]] = MappingProxyType(
    {**{name: CALL[name].kind for name in RESOURCES}, "slow_down": FACTOR, "availability": PART}
)
_PART: Final = re.compile(r"(?:\*|(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?)(?:/(?P<step>\d{1,9}))?")
_TABLE: Final = "table of clients"

#: What one client has of its own: values of :data:`KEYS`.
Own = Mapping[str, Any]
_NOTHING: Final[Own] = {}


@dataclass(frozen=True)
class Clients:
    """What the clients of a run have of their own.

    ``by_type``: it by message type, and there by partition. A type that is not there has that of "", which is
    what the table says. Clients that have the same share one mapping.
    """

    by_type: Mapping[str, tuple[Own, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Mapping[Any, Any], count: int) -> Clients:
        """Read a table of so many clients: by patterns of partitions, what these have.

        Raises ConfigError if a pattern, a client, a key or a value cannot be used.
        """
        if not isinstance(entries, Mapping):
            raise TypeError(f"clients must be a mapping by partition, not a {type(entries).__name__}")
        own: list[Own] = [_NOTHING] * count
        for pattern, entry in entries.items():
            values = _values(pattern, entry)
            for partition in _partitions(pattern, count):
                own[partition] = joined(own[partition], values)
        return cls({"": _shared(own)} if entries else {})

    def with_app(self, told: Mapping[str, Sequence[Own]], options: Mapping[str, Any]) -> Clients:
        """Return the same with what the app says of each client, by message type.

        ``options``: of the run's calls. These and the table come before the app.
        """
        given = {name for name, value in options.items() if value is not None}
        given |= {name for name in RESOURCES if CALL[name].is_nodes and os.environ.get(CALL[name].variable)}
        given |= {CALL[name].excludes for name in given}

        def both(partition: int, own: Own) -> Own:
            left = {name: value for name, value in own.items() if name not in given}
            return joined(left, self.of_client(partition))

        of_app = {kind: _shared(both(*each) for each in enumerate(of)) for kind, of in told.items()}
        return Clients({**self.by_type, **of_app})

    def of_client(self, partition: int, message_type: str = "") -> Own:
        """Return what a client has of its own, in calls of a type."""
        usual = self.by_type.get("", ())
        own = self.by_type.get(message_type.removesuffix(".default"), usual)
        return own[partition] if own else _NOTHING

    def differ(self, message_type: str) -> bool:
        """Return True if clients must be handled one by one: some have other options, or are slowed down."""
        own = self.by_type.get(message_type.removesuffix(".default"), self.by_type.get("", ()))
        return len({id(each) for each in own}) > 1 or any("slow_down" in each for each in own[:1])

    def resources(self) -> list[dict[str, Any]]:
        """Return the options of calls that there are among what clients have of their own, each once."""
        all_own = {id(own): own for of_type in self.by_type.values() for own in of_type}
        return list({_key(each): each for each in map(resources, all_own.values())}.values()) or [{}]


def resources(own: Own) -> dict[str, Any]:
    """Return the options of calls among what a client has of its own."""
    return {name: own[name] for name in RESOURCES if name in own}


def _shared(all_own: Iterable[Own]) -> tuple[Own, ...]:
    """Return the same, with one mapping for all clients that have the same."""
    same: dict[tuple[Any, ...], Own] = {}
    return tuple(same.setdefault(_key(own), own) for own in all_own)


def _key(own: Own) -> tuple[Any, ...]:
    return tuple(sorted(own.items()))


def as_written(own: Own) -> dict[str, Any]:
    """Return what a client has of its own, with the keys of a file."""
    return {name.replace("_", "-"): value for name, value in own.items()}


def plain(entries: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """Return a table as a file holds it."""
    return {str(pattern): as_written(entry) for pattern, entry in entries.items()}


def _values(pattern: Any, entry: Any) -> dict[str, Any]:
    """Return the values of an entry, by their names in Python."""
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
            known = ", ".join(each.replace("_", "-") for each in KEYS)
            raise ConfigError(f"{source}: there is no such key; there are {known}")
        others = {name, CALL[name].excludes if name in CALL else ""} & values.keys()
        if others:
            written = others.pop().replace("_", "-")
            raise ConfigError(f"{source}: {written} is given as well; give one of the two")
        # As a config, whose values of a wrong type are no errors in code.
        read = GivenValue(value, KEYS[name], 0, source, is_config=True).read()
        values[name] = value if isinstance(value, int | float | str) else read
    return values


def _partitions(pattern: Any, count: int) -> Iterator[int]:
    """Return the clients that a pattern names: "7", "0-9", "*", "*/4", or several with commas."""
    named = f'{_TABLE}: "{pattern}" names'
    for part in str(pattern).split(","):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise ConfigError(
                f"{named} no clients. Write a partition such as 7, a range such as 0-9, or * for all; with "
                "/4 every 4th of them; several of these with commas between them"
            )
        first = int(found["first"] or 0)
        last = int(found["last"] or found["first"] or count - 1)
        step = int(found["step"] or 1)
        if last < first or step < 1:
            raise ConfigError(f"{named} no clients: a range goes up, and /1 is the smallest step")
        if last >= count:
            raise ConfigError(
                f"{named} client {last}, and there are {count}, from 0 to {count - 1}. Change it, or give "
                "more clients (--num-supernodes)"
            )
        yield from range(first, last + 1, step)


def told_by_app(
    app: AppReference | ClientApp, nodes: VirtualNodes, options: Mapping[str, Any]
) -> Mapping[str, Sequence[Own]]:
    """Return what an app's own ``gpu_mod`` says of each client, by message type; "" stands for all types.

    ``options``: of the run's calls.

    Raises ConfigError if it says what cannot be used. Of an app that cannot be imported nothing is known: its
    messages fail, and tell why.
    """
    try:
        if isinstance(app, ClientApp):  # its functions are here already
            return _told(app, nodes)
        if not is_more_than_listed(app.folder, app.name.partition(":")[0], "gpu_mod"):
            return {}
        # It imports the app's modules, which this process must not have, and waits for nobody.
        env = {**(options.get("env") or {}), CPU_LEASES.variable: "off", CALL["gpu"].variable: "never"}
        settings = call_settings({"start_method": options.get("start_method"), "env": env})
        told: Mapping[str, Sequence[Own]] = run_call(
            _told, (app, nodes), settings=settings, kind="asking gpu_mod"
        )
        return told
    except (ConfigError, TypeError) as error:
        raise ConfigError(
            f"gpu_mod of the app: {text_of(error)}. A simulation asks it once for each client, before the "
            "first message, when context.state is empty"
        ) from error
    except Exception:
        return {}


def _told(app: AppReference | ClientApp, nodes: VirtualNodes) -> Mapping[str, Sequence[Own]]:
    """Ask an app; one that is imported for this in a worker."""
    checked: set[str] = set()

    def options_of(ask_mod: Callable[[Context], Mapping[str, Any]], node_id: int) -> Own:
        options = ask_mod(nodes.context_of(node_id, b""))
        if repr(options) not in checked:
            call_settings(options)
            checked.add(repr(options))
        found = {name: value for name, value in resources(options).items() if value is not None}
        if found.get("gpu") != "never":  # what it asks of its nodes is not for a machine that plays them
            found.pop("gpu", None)
        return found

    asked = mod_options(app.load() if isinstance(app, AppReference) else app).items()
    return {kind: [options_of(ask_mod, node_id) for node_id in nodes.ids] for kind, ask_mod in asked}
