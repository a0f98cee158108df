"""The state that a strategy keeps from round to round, as records that a checkpoint can hold.

A strategy that has ``state_dict()`` and ``load_state_dict(state)``, as PyTorch's modules and optimizers have
them, says itself what its state is. Any strategy can opt in so, unless it has a ``start`` of its own.

The state of Flower's own strategies is known without that. Attributes that rounds change are state: moments,
momentum, a clipping norm, the model of the round before. What no round changes comes from the app: fractions,
learning rates, names in records. When a run goes on, such an attribute is as the app gives it now. Functions
are never state.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping
from logging import WARNING
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flower_gpu.errors import ConfigError
from flower_gpu.flower import arrays
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.workers.transport.regions import Region

#: The kind of a checkpoint of flower_gpu's FedAvg, or of a class derived from it.
OUR_FEDAVG: Final = "flower_gpu.FedAvg"

_FLOWERS: Final = "flwr."
_OF_PACKAGES: Final = (_FLOWERS, "flower_gpu.")
_RAW: Final = "numpy's memory"  # how the arrays of a state are written; Flower's records have their own way
_Record = ArrayRecord | MetricRecord | ConfigRecord
_ATTRIBUTES: Final = "attributes"  # the record of a state that says what the others are
_ITSELF: Final = "strategy itself"  # the path of a state_dict() of the whole strategy
#: Strategies whose runs can be resumed, for error messages.
RESUMABLE: Final = (
    "Flower's own strategies (flwr.serverapp.strategy), flower_gpu.FedAvg and FedBuff have checkpoints, and "
    "so do all strategies with state_dict() and load_state_dict() and without a start() of their own"
)


def without_checkpoint() -> str:
    """Return how to start a run without its checkpoint, for errors: of a command, or of ``resumable()``."""
    return "without --resume" if os.environ.get(RUN_DIR_VARIABLE) else "in another folder"


class StrategyState:
    """The state of a strategy while it runs.

    ``strategy``: a strategy that was not started yet.
    ``kind``: its class, as :func:`kind_of` returns it.

    Raises TypeError if files cannot hold a value of the state.
    """

    def __init__(self, strategy: Strategy, kind: str) -> None:
        self.kind = kind
        self._strategy = strategy
        self._first = {path: value.text for path, value in _written(strategy)}

    def changed(self) -> RecordDict | None:
        """Return the attributes that rounds have changed; None, and a log line, if they cannot be saved.

        The records read the strategy's own arrays: they hold until the next round.
        """
        try:
            entries = [(path, value.text, value.records()) for path, value in _written(self._strategy)]
        except TypeError as error:
            log(
                WARNING,
                "This round is not in the checkpoint: %s. The checkpoint of an earlier one stays",
                error,
            )
            return None
        changed = [entry for entry in entries if entry[2] or entry[1] != self._first.get(entry[0])]
        attributes = ConfigRecord({path: text for path, text, _ in changed})
        records = {f"{path} {name}": record for path, _, more in changed for name, record in more.items()}
        return RecordDict({_ATTRIBUTES: attributes, **records})

    def restore(self, state: RecordDict) -> None:
        """Restore the attributes of :meth:`changed`.

        Raises ConfigError if the strategy cannot take it.
        """
        texts = state[_ATTRIBUTES]
        assert isinstance(texts, ConfigRecord)
        for path, text in texts.items():
            *inner, name = path.split(".")
            owner = self._strategy
            for part in inner:
                owner = vars(owner)[part]
            match json.loads(str(text)):
                case ["state_dict", content]:
                    target = self._strategy if path == _ITSELF else getattr(owner, name, None)
                    _load(target, _value(content, path, state), path)
                case description:
                    setattr(owner, name, _value(description, path, state))


def state_of(strategy: Strategy) -> StrategyState | None:
    """Return the state of a strategy that is known, or None if there can be no checkpoint of it."""
    kind = kind_of(strategy)
    if kind is None:
        return None
    try:
        return StrategyState(strategy, kind)
    except TypeError as error:
        log(WARNING, "There will be no checkpoint: %s", error)
        return None


def opts_in(strategy: Strategy) -> bool:
    """Return True if a strategy says itself what its state is, and has no ``start`` of its own."""
    has_state = all(callable(getattr(strategy, name, None)) for name in ("state_dict", "load_state_dict"))
    return has_state and type(strategy).start.__module__.startswith(_OF_PACKAGES)


def kind_of(strategy: Strategy) -> str | None:
    """Return the class of a strategy, with those inside it, if the state of all of them is known; else None.

    A class derived from one of Flower's may keep anything, and so may an object with a method of its own.
    """
    name = _name(strategy)
    return name if name is None or opts_in(strategy) else f"{flowers.__name__}.{name}"


def _name(strategy: Strategy) -> str | None:
    kind, attributes = type(strategy), vars(strategy)
    if opts_in(strategy):
        return f"{kind.__module__}.{kind.__qualname__}"
    if getattr(flowers, kind.__name__, None) is not kind:
        return None
    # Not Python's own: recording replaces __getattribute__ while a run goes on.
    methods = [item for item in inspect.getmembers(kind, inspect.isfunction) if not item[0].startswith("__")]
    if any(name in attributes or not method.__module__.startswith(_FLOWERS) for name, method in methods):
        return None
    inside = [_name(value) for value in attributes.values() if isinstance(value, Strategy)]
    if not inside:
        return str(kind.__name__)
    return None if None in inside else f"{kind.__name__}({', '.join(map(str, inside))})"


class _Written:
    """A value as JSON, with its arrays and records beside it."""

    def __init__(self, value: Any) -> None:
        self._arrays: list[NDArray[Any]] = []
        self._records: list[_Record] = []
        self.text = json.dumps(self._described(value))

    def records(self) -> dict[str, _Record]:
        """Return the arrays and records, by name; empty if there is no more than the text."""
        records = {str(number): record for number, record in enumerate(self._records)}
        if self._arrays:
            records["arrays"] = ArrayRecord(
                {
                    str(number): arrays._rebuild(
                        array.dtype.str, array.shape, _RAW, Region(array.reshape(-1).view(np.uint8).data)
                    )
                    for number, array in enumerate(self._arrays)
                }
            )
        return records

    def _described(self, value: Any) -> Any:
        """Return JSON's own values unchanged, and for others a list of a type's name and the content."""
        if isinstance(value, np.generic):
            return ["number", self._add(np.asarray(value))]
        if isinstance(value, bool | int | float | str | None):
            return value
        if type(value) in (list, tuple):
            return [type(value).__name__, [self._described(item) for item in value]]
        if type(value) is dict:
            items = value.items()
            return ["dict", [[self._described(key), self._described(item)] for key, item in items]]
        if isinstance(value, bytes):
            return ["bytes", self._add(np.frombuffer(value, np.uint8))]
        if type(value) is np.ndarray:
            return ["array", self._add(value)]
        if isinstance(value, _Record):
            self._records.append(value)
            return ["record", len(self._records) - 1]
        # Strategies that opt in, and Flower's PrivacyAccountant.
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return ["state_dict", self._described(value.state_dict())]
        raise TypeError(f"files cannot hold a value of type {type(value).__name__}")

    def _add(self, array: NDArray[Any]) -> int:
        if array.dtype.kind in "OV":  # of objects, or of a type that numpy does not know
            raise TypeError(f"files cannot hold an array of {array.dtype}")
        self._arrays.append(array if array.flags.c_contiguous else array.copy(order="C"))
        return len(self._arrays) - 1


def _written(strategy: Strategy, prefix: str = "") -> Iterator[tuple[str, _Written]]:
    """Yield the state of a strategy, and of those inside it, by the path of each attribute."""
    if opts_in(strategy):
        try:
            yield prefix.rstrip(".") or _ITSELF, _Written(strategy)
        except TypeError as error:
            raise TypeError(f"{type(strategy).__name__}.state_dict() cannot be written: {error}") from error
        return
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _written(value, f"{prefix}{name}.")
        elif not callable(value):
            try:
                yield f"{prefix}{name}", _Written(value)
            except TypeError as error:
                raise TypeError(f"{type(strategy).__name__}.{name} cannot be written: {error}") from error


def _value(description: Any, path: str, records: Mapping[str, Any]) -> Any:
    """Return the value of a description."""
    match description:
        case ["list", items]:
            return [_value(item, path, records) for item in items]
        case ["tuple", items]:
            return tuple(_value(item, path, records) for item in items)
        case ["dict", items]:
            return {_value(key, path, records): _value(item, path, records) for key, item in items}
        case ["record", number]:
            record = records[f"{path} {number}"]
            return type(record)(dict(record))
        case [kind, number]:
            array = records[f"{path} arrays"][str(number)]
            entries: NDArray[Any] = np.ndarray(array.shape, np.dtype(array.dtype), array.data).copy()
            if kind == "bytes":
                return entries.tobytes()
            return entries[()] if kind == "number" else entries
    return description


def _load(target: Any, content: Any, path: str) -> None:
    try:
        target.load_state_dict(content)
    except (AttributeError, ValueError, TypeError) as error:
        what = path if path == _ITSELF else f"strategy's {path}"
        raise ConfigError(
            f"the {what} refuses its state in the checkpoint: {error}. "
            f"Use the app with which the run began, or start a new run {without_checkpoint()}"
        ) from error
