"""The last finished round of a run: model, metrics, random state, and the states of all nodes.

    checkpoint.json     the index: number of the round, and the place of everything in the files
    7.model             the model and the strategy's state after round 7
    5.model             an earlier model, which FedBuff's messages in flight need
    1.metrics           the metrics of all rounds; see metrics_log
    4.states, 7.states  states that changed before the rounds were written

Bytes to which an index refers never change. The files of a round are new or are appended to, and are synced.
Then a new index replaces the previous index, and files without a reference are deleted. So the folder has a
complete round even if the process is killed at any moment. The process that writes holds the run's lock
(``in_use`` of :mod:`flower_gpu.apps.folder`).

A round only writes what has changed. All changed states of a round go into a single file, because a thousand
small files would have to be synced one by one. When less than half of such a file is still in use, its states
move to the next file. If a strategy keeps the model of an earlier round, it keeps the same object. So the
index can refer to the file that already has that model.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flwr.app import ArrayRecord, RecordDict

from flower_gpu import files
from flower_gpu.apps.folder import CHECKPOINT_INDEX as INDEX_NAME
from flower_gpu.errors import ConfigError
from flower_gpu.flower import record_bytes
from flower_gpu.flower.record_bytes import Buffer
from flower_gpu.flower.records import records_of
from flower_gpu.printable import path_text
from flower_gpu.strategies.resuming.metrics_log import MetricsLog
from flower_gpu.strategies.resuming.states import FilePlace, StateStore, disk_error
from flower_gpu.strategies.rounds import RoundState
from flower_gpu.strategies.strategy_state import without_checkpoint

FORMAT_VERSION: Final = 5

_HEAD: Final = re.compile(rb"flower-gpu checkpoint, format (\d+), checksum (\d+)")  # the index's first line
_OURS: Final = re.compile(r"\d+\.(model|metrics|states)")
_ENTRY_BYTES: Final = 64  # upper bound for a state's entry in the index
_INDEX_BYTES: Final = 1 << 16  # estimate for the rest of the index, metrics, and overhead of the file system
_ARRAYS: Final = "arrays"  # name of the only record in each part of a file with models

#: Names in errors of the values that a user sets by an option of ``simulate``.
_WITH_OPTION: Final = MappingProxyType(
    {"num_supernodes": "num_supernodes (--clients)", "seed": "seed (--seed)"}
)


class _WrittenModel:
    """A model in a file. The record is kept here, so that no other object can have its id."""

    def __init__(self, record: ArrayRecord, place: FilePlace) -> None:
        self.record = record
        self.place = place
        self._arrays = list(record.items())

    def is_same(self) -> bool:
        """Return True if the record still has the arrays that were written: a strategy may replace some."""
        arrays = list(self.record.items())
        return len(arrays) == len(self._arrays) and all(
            name == written_name and array is written
            for (name, array), (written_name, written) in zip(arrays, self._arrays, strict=True)
        )


class Checkpoints:
    """The checkpoint of a run in a folder: it is written after each round, and read to resume the run.

    The store reads states from the checkpoint when they have left the memory. So the folder must exist for as
    long as the run.
    ``identity``: values that must be the same in a run that resumes this one, for example
    ``{"number of nodes": 100}``.
    """

    def __init__(self, folder: Path, states: StateStore, identity: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._index = folder / INDEX_NAME
        self._states = states
        self._identity: dict[str, Any] = json.loads(json.dumps(dict(identity or {})))
        self._serial = 0  # number of the newest files; never reused
        self._places: dict[int, FilePlace] = {}  # states in the index, by partition
        self._models: dict[int, _WrittenModel] = {}  # models in the index, by the id() of the record
        self._metrics = MetricsLog()
        self._used: set[Path] = set()  # files to which the index refers

    def write(self, state: RoundState) -> None:
        """Write a finished round, which replaces the previous round.

        Raises a FlowerGPUError if the disk is full or cannot be written to. The previous round then stays.
        """
        kept, rest = _parted(state.strategy_state or {})
        # First the model of the round, then those arrays of the strategy that are in no file yet.
        models = [state.arrays, *(record for record in kept.values() if not self._has(record))]
        parts = [record_bytes.encode_parts(RecordDict({_ARRAYS: model})) for model in models]
        parts.append(record_bytes.encode_parts(RecordDict(rest)))
        size = sum(len(buffer) for part in parts for buffer in part) + _INDEX_BYTES
        next_step = (
            "free space, and continue from the checkpoint, which is that of the round before"
            if self._used
            else "there is no checkpoint of an earlier one: free space, and start the run again"
        )
        try:
            with self._states.hold_changes() as changed:
                size += sum(self._states.size_bytes(partition) for partition in changed)
                size += _ENTRY_BYTES * (len(self._places) + len(changed))
                try:
                    self._write(state, kept, models, parts, changed)
                finally:
                    self._delete_unused()
        except OSError as error:
            text = f"Round {state.server_round} is finished but may not be written; {next_step}"
            raise disk_error(error, self._folder, size, text) from error

    def _write(
        self,
        state: RoundState,
        kept: Mapping[str, ArrayRecord],
        models: Sequence[ArrayRecord],
        parts: Sequence[Sequence[Buffer]],
        changed: Set[int],
    ) -> None:
        """Write the files of a round, and let the index refer to them.

        ``kept``: arrays that the strategy keeps besides the model, by name.
        ``models``: arrays that are in no file yet.
        ``parts``: data to write: each of the models, then the rest of the strategy's state.
        ``changed``: partitions with changed states.
        """
        self._serial += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        places, written_states = self._write_states(changed)
        *new_places, rest = _write_file(self._file(self._serial, "model"), parts)
        new = [_WrittenModel(model, place) for model, place in zip(models, new_places, strict=True)]
        known = self._models | {id(model.record): model for model in new}
        in_use = {id(record): known[id(record)] for record in (state.arrays, *kept.values())}
        metrics = self._metrics.append(state, self._file(self._serial, "metrics"))
        content = {
            "identity": self._identity,
            "serial": self._serial,
            "server_round": state.server_round,
            "random_state": state.random_state,
            "strategy": state.strategy,
            "first_model": state.first_model,
            "model": _entry(new_places[0]),
            "kept": [(name, _entry(known[id(record)].place)) for name, record in kept.items()],
            "strategy_state": _entry(rest),
            "metrics": _entry(metrics),
            "states": [(number, _entry(place)) for number, place in places.items()],
        }
        text = json.dumps(content).encode()
        used = _files_of(rest, metrics, in_use, places)
        with files.replaced(self._index, has_one_writer=True) as index:
            head = f"flower-gpu checkpoint, format {FORMAT_VERSION}, checksum {zlib.crc32(text)}\n"
            index.write_bytes(head.encode() + text)
            _sync(index)
            _sync(self._folder)  # the names of the new files
            # If the replacement fails, either index may be in place, so the files of both are kept.
            self._used |= used
        self._used, self._places, self._models = used, places, in_use
        self._metrics.saved()
        self._states.saved(written_states)
        _sync(self._folder)

    def _write_states(self, changed: Set[int]) -> tuple[dict[int, FilePlace], dict[int, FilePlace]]:
        """Write changed states; return the places of all states, and those of the written states."""
        places = {number: place for number, place in self._places.items() if number not in changed}
        sizes_in_use = Counter[Path]()
        for place in places.values():
            sizes_in_use[place.path] += place.size_bytes
        sparse = {path for path, size in sizes_in_use.items() if 2 * size < path.stat().st_size}
        moving = [number for number in changed if self._states.size_bytes(number)]
        moving += [number for number, place in places.items() if place.path in sparse]
        written = {}
        if moving:
            contents = ([self._states.read(number)] for number in moving)
            new_places = _write_file(self._file(self._serial, "states"), contents)
            written = dict(zip(moving, new_places, strict=True))
        return places | written, written

    def _has(self, record: ArrayRecord) -> bool:
        """Return True if the index refers to these arrays already."""
        model = self._models.get(id(record))
        return model is not None and model.is_same()

    def _file(self, serial: int, kind: str) -> Path:
        return self._folder / f"{serial}.{kind}"

    def _place(self, kind: str, entry: Sequence[Any]) -> FilePlace:
        """Return the place of an entry of the index; raises ValueError or TypeError if it is no entry.

        ``kind``: kind of the file.
        """
        serial, offset, size, checksum = map(int, entry)
        return FilePlace(self._file(serial, kind), offset, size, checksum)

    def _delete_unused(self) -> None:
        """Delete the files that are not part of the checkpoint."""
        with suppress(OSError):
            for path in list(self._folder.iterdir()):
                if path not in self._used and _OURS.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def read(self) -> RoundState | None:
        """Return the last finished round, or None, and restore the states of the nodes.

        Raises a ConfigError if the checkpoint is of another run, was written by another version, or is
        damaged.
        """
        if not self._index.exists():
            return None
        try:
            return self._read(self._content())
        except ConfigError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise _damaged(self._index, str(error)) from error

    def _read(self, content: Mapping[str, Any]) -> RoundState:
        """Read the round that the content of an index refers to."""
        serial = int(content["serial"])
        places = {int(number): self._place("states", entry) for number, entry in content["states"]}
        # Read all states now, so that damage is found here and not by a client in the middle of a round.
        for place in places.values():
            _data(place)
        metrics_place = self._place("metrics", content["metrics"])
        metrics = self._metrics.restore(metrics_place, _data(metrics_place))
        kept = {name: self._read_model(entry) for name, entry in content["kept"]}
        model = self._read_model(content["model"])
        rest = self._place("model", content["strategy_state"])
        kept_records = {name: written.record for name, written in kept.items()}
        state = RoundState(
            server_round=int(content["server_round"]),
            arrays=model.record,
            random_state=content["random_state"],
            strategy=content["strategy"],
            first_model=content.get("first_model", ""),
            strategy_state=RecordDict({**record_bytes.decode(_data(rest)), **kept_records}),
            **metrics,
        )
        self._serial, self._places = serial, places
        self._models = {id(written.record): written for written in (model, *kept.values())}
        self._used = _files_of(rest, metrics_place, self._models, places)
        self._states.saved(places)
        return state

    def _read_model(self, entry: Sequence[Any]) -> _WrittenModel:
        place = self._place("model", entry)
        record = records_of(record_bytes.decode(_data(place)), ArrayRecord)[_ARRAYS]
        # Converted to Flower's own arrays. Only those are recognized as shared, and so written only once for
        # all workers of a round.
        return _WrittenModel(ArrayRecord(dict(record)), place)

    def _content(self) -> dict[str, Any]:
        """Return the content of the index; raises ConfigError if it is of another run or version."""
        head, _, text = self._index.read_bytes().partition(b"\n")
        match = _HEAD.fullmatch(head)
        if match is None:
            raise ValueError("it is not a checkpoint of flower-gpu")
        if (version := int(match[1])) != FORMAT_VERSION:
            raise ConfigError(
                f"{path_text(self._index)} was written by another flower-gpu: its format is version "
                f"{version}, and this one reads version {FORMAT_VERSION}. Continue the run with the version "
                f"that began it, or start it again {without_checkpoint()}"
            )
        if zlib.crc32(text) != int(match[2]):
            raise ValueError("its checksum differs")
        content: dict[str, Any] = json.loads(text)
        self._compare(content["identity"])
        return content

    def _compare(self, other: Mapping[str, Any]) -> None:
        names = dict.fromkeys([*other, *self._identity])
        nothing = object()
        differing = [
            f"{_WITH_OPTION.get(name, name)} was {_shown(other, name)} and is {_shown(self._identity, name)}"
            for name in names
            if other.get(name, nothing) != self._identity.get(name, nothing)
        ]
        if differing:
            raise ConfigError(
                f"the run in {path_text(self._folder)} cannot be continued by this one: "
                f"{'; '.join(differing)}. Give the earlier values, or start a new run {without_checkpoint()}"
            )


def _write_file(path: Path, contents: Iterable[Sequence[Buffer]]) -> list[FilePlace]:
    """Write and sync a new file, and return the place of each of its contents.

    ``contents``: each content is a sequence of parts.
    """
    places = []
    with path.open("wb") as file:
        for parts in contents:
            offset, checksum = file.tell(), 0
            for part in parts:
                file.write(part)
                checksum = zlib.crc32(part, checksum)
            places.append(FilePlace(path, offset, file.tell() - offset, checksum))
        file.flush()
        os.fsync(file.fileno())
    return places


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path_text(path)} is damaged ({reason}), so that the run cannot be continued. Restore the file "
        f"from a copy if there is one; otherwise, start the run again {without_checkpoint()}"
    )


def _parted(state: Mapping[str, Any]) -> tuple[dict[str, ArrayRecord], dict[str, Any]]:
    """Return the arrays in a strategy's state, and the other records."""
    kept = {name: record for name, record in state.items() if isinstance(record, ArrayRecord)}
    return kept, {name: record for name, record in state.items() if name not in kept}


def _entry(place: FilePlace) -> tuple[int, int, int, int]:
    """Return a place in the format of the index: number of the file, offset, size and checksum."""
    return int(place.path.stem), place.offset_bytes, place.size_bytes, place.checksum


def _files_of(
    rest: FilePlace,
    metrics: FilePlace,
    models: Mapping[int, _WrittenModel],
    states: Mapping[int, FilePlace],
) -> set[Path]:
    """Return the files of an index, by the places to which it refers."""
    places = (rest, metrics, *(model.place for model in models.values()), *states.values())
    return {place.path for place in places}


def _data(place: FilePlace) -> bytes:
    """Return the data at a place; raises ConfigError if they differ from the data that was written."""
    try:
        return place.read()
    except (OSError, ValueError, OverflowError) as error:
        raise _damaged(place.path, str(error)) from error


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return json.dumps(fields[name]) if name in fields else "not set"
