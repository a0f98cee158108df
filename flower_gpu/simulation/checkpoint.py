"""The last finished round of a run, in files: model, metrics, random state, and the states of all nodes.

A folder holds ``checkpoint.json``, the index, and files that it refers to. These never change: a round's
go into new ones, then the index is replaced, then what it no longer refers to is deleted. So whatever
moment the process is killed at, the folder holds a complete round. States go into one file for each round
that changed any: a thousand small files would have to be synced one by one. A file of which less than half
is still in use is given up, and what is in use moves along with the states that changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from flower_gpu.errors import ConfigError
from flower_gpu.flower.records import records_of
from flower_gpu.printable import path_text
from flower_gpu.simulation import record_bytes
from flower_gpu.simulation.places import Place, disk_error, write_all
from flower_gpu.simulation.record_bytes import Buffer
from flower_gpu.simulation.states import StateStore, StoredState

if TYPE_CHECKING:
    from flower_gpu.flower.rounds import RoundState

INDEX_NAME: Final = "checkpoint.json"
FORMAT: Final = "flower-gpu checkpoint"
FORMAT_VERSION: Final = 1

_OURS = re.compile(r"(\d+)\.(model|states)|" + re.escape(INDEX_NAME) + r"\.tmp")
_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 4096  # of a file system: files take whole ones
_ENTRY_BYTES = 64  # of a state in the index, at most
# In the file with the model.
_MODEL, _TRAIN, _EVALUATE, _CLIENTS = "arrays", "train ", "evaluate ", "clients "


class Checkpoints:
    """Writes the state of a run after each round, and reads it.

    Parameters
    ----------
    folder : Path
        The checkpoint's; made when the first one is written.
    states : StateStore
        The states of the nodes. Those that are in the checkpoint are read from there when they have left
        the memory, so that the folder must stay as long as the run.
    identity : mapping
        What a run must have in common with the one that it continues: JSON values by what they are, such as
        ``{"number of nodes": 100}``.
    """

    def __init__(self, folder: Path, states: StateStore, identity: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._states = states
        self._identity: dict[str, Any] = json.loads(json.dumps(dict(identity or {})))
        self._written: dict[int, tuple[int, Place]] = {}  # version and place of each state in the index
        self._serial: int | None = None

    def write(self, state: RoundState) -> None:
        """Write a finished round in the place of the one before.

        Raises
        ------
        FlowerGPUError
            If the disk is full or cannot be written to. The round before is still there.
        """
        index = self._folder / INDEX_NAME
        model = _model_parts(state)
        size = _on_disk(sum(map(len, model)))
        serial = -1
        is_replaced = False
        try:
            with self._states.frozen() as stored:
                changed = self._to_write(stored)
                size += _on_disk(sum(entry.size_bytes for entry in changed.values()))
                size += _on_disk(_ENTRY_BYTES * len(stored) + len(json.dumps(state.random_state)))
                serial = self._next_serial()
                written = {key: self._written[key] for key in stored.keys() - changed.keys()}
                written.update(self._write_states(self._folder / f"{serial}.states", changed))
            (place,) = _write_file(self._folder / f"{serial}.model", [model])
            temporary = self._write_index(state, place, written)
            _sync_folder(self._folder)  # the names of what the index refers to
            temporary.replace(index)
            is_replaced = True
            _sync_folder(self._folder)
        except OSError as error:
            self._discard(serial)  # first: the room that it takes is free again
            next_step = (
                "free space, and continue from the checkpoint, which is that of the round before"
                if index.exists()
                else "there is no checkpoint of an earlier one: free space, and start the run anew"
            )
            text = f"Round {state.server_round} is finished but may not be written; {next_step}"
            raise disk_error(error, self._folder, size, text) from error
        finally:
            if not is_replaced:
                self._discard(serial)
        self._written = written
        for partition in changed:
            self._states.saved(partition, *written[partition])
        self._delete_all_but([place, *(place for _, place in written.values())])

    def read(self) -> RoundState | None:
        """Read the last finished round, and give the nodes their states of that time.

        Returns
        -------
        RoundState or None
            None if no round was finished.

        Raises
        ------
        ConfigError
            If it is of another run, was written by a newer version, or a file of it is damaged or missing.
        """
        content = self._read_index()
        if content is None:
            return None
        self._compare(content["identity"])
        files = [self._folder / name for name in content["files"]]
        places = {
            partition: Place(files[number], offset, size, checksum)
            for partition, number, offset, size, checksum in content["states"]
        }
        model = Place(self._folder / content["model"][0], *content["model"][1:])
        for place in (model, *places.values()):  # said now, and not by a client in the middle of a round
            _check(place)
        found = _round_state(content, record_bytes.decode(model.read()))
        self._written = {
            partition: (self._states.adopt(partition, place), place) for partition, place in places.items()
        }
        return found

    def _discard(self, serial: int) -> None:
        """Delete what there is of a round that could not be written to its end."""
        for name in (f"{serial}.model", f"{serial}.states", f"{INDEX_NAME}.tmp"):
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()

    def _to_write(self, stored: Mapping[int, StoredState]) -> dict[int, StoredState]:
        """Return the states that the next file has to hold."""
        kept = {
            partition: self._written[partition][1]
            for partition, entry in stored.items()
            if partition in self._written and self._written[partition][0] == entry.version
        }
        used: dict[Path, int] = {}
        for place in kept.values():
            used[place.path] = used.get(place.path, 0) + place.size_bytes
        sparse = {path for path, size in used.items() if 2 * size < path.stat().st_size}
        return {
            partition: entry
            for partition, entry in stored.items()
            if partition not in kept or kept[partition].path in sparse
        }

    def _write_states(
        self, path: Path, entries: Mapping[int, StoredState]
    ) -> Iterator[tuple[int, tuple[int, Place]]]:
        if not entries:
            return
        places = _write_file(path, ([entry.read()] for entry in entries.values()))
        for (partition, entry), place in zip(entries.items(), places, strict=True):
            yield partition, (entry.version, place)

    def _write_index(self, state: RoundState, model: Place, written: Mapping[int, tuple[int, Place]]) -> Path:
        numbers = {
            name: number for number, name in enumerate({place.path.name for _, place in written.values()})
        }
        content = {
            "identity": self._identity,
            "server_round": state.server_round,
            "random_state": state.random_state,
            "model": (model.path.name, *_numbers(model)),
            "files": list(numbers),
            "states": [
                (partition, numbers[place.path.name], *_numbers(place))
                for partition, (_, place) in written.items()
            ],
        }
        body = json.dumps(content).encode()
        head = {"format": FORMAT, "version": FORMAT_VERSION, "checksum": zlib.crc32(body)}
        path = self._folder / f"{INDEX_NAME}.tmp"
        path.unlink(missing_ok=True)
        _write_file(path, [[json.dumps(head).encode() + b"\n", body]])
        return path

    def _read_index(self) -> dict[str, Any] | None:
        path = self._folder / INDEX_NAME
        try:
            head, _, body = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _damaged(path, error.strerror or str(error)) from error
        try:
            found = json.loads(head)
            version = found["version"] if found["format"] == FORMAT else None
        except (ValueError, TypeError, KeyError):
            version = None
        if not isinstance(version, int):
            raise _damaged(path, "it does not begin as a checkpoint does")
        if version > FORMAT_VERSION:
            raise ConfigError(
                f"{path_text(path)} was written by a newer flower-gpu: its format is version {version}, and "
                f"this one reads version {FORMAT_VERSION}. Continue the run with the version that began it"
            )
        if found.get("checksum") != zlib.crc32(body):
            raise _damaged(path, "its checksum is another one")
        content: dict[str, Any] = json.loads(body)
        return content

    def _compare(self, other: Mapping[str, Any]) -> None:
        names = dict.fromkeys([*other, *self._identity])
        nothing = object()
        differing = [
            f"{name} was {_shown(other, name)} and is {_shown(self._identity, name)}"
            for name in names
            if other.get(name, nothing) != self._identity.get(name, nothing)
        ]
        if differing:
            raise ConfigError(
                f"the run in {path_text(self._folder)} cannot be continued by this one: "
                f"{'; '.join(differing)}. Give the same as then, or start a new run without --resume"
            )

    def _next_serial(self) -> int:
        if self._serial is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            found = (_OURS.fullmatch(path.name) for path in self._folder.iterdir())
            self._serial = max((int(name[1]) for name in found if name and name[1]), default=0)
        self._serial += 1
        return self._serial

    def _delete_all_but(self, places: Iterable[Place]) -> None:
        kept = {place.path.name for place in places}
        with contextlib.suppress(OSError):
            for path in list(self._folder.iterdir()):
                if path.name not in kept and _OURS.fullmatch(path.name):
                    path.unlink(missing_ok=True)


def _on_disk(size_bytes: int) -> int:
    """Return how much room a file takes, with its share of the folder."""
    return (size_bytes // _BLOCK_BYTES + 2) * _BLOCK_BYTES if size_bytes else 0


def _model_parts(state: RoundState) -> list[Buffer]:
    """Return the global model, and the metrics of all rounds so far."""
    records = RecordDict({_MODEL: state.arrays})
    for prefix, metrics in (
        (_TRAIN, state.train_metrics),
        (_EVALUATE, state.evaluate_metrics),
        (_CLIENTS, state.client_metrics),
    ):
        for server_round, record in metrics.items():
            records[f"{prefix}{server_round}"] = record
    return record_bytes.encode_parts(records)


def _round_state(content: Mapping[str, Any], records: RecordDict) -> RoundState:
    from flower_gpu.flower.rounds import RoundState

    def metrics(prefix: str) -> dict[int, MetricRecord]:
        found = records_of(records, MetricRecord).items()
        return {int(name[len(prefix) :]): record for name, record in found if name.startswith(prefix)}

    return RoundState(
        server_round=content["server_round"],
        # As Flower's own arrays: their bytes are known again, and written once for all workers of a round.
        arrays=ArrayRecord(dict(records_of(records, ArrayRecord)[_MODEL])),
        train_metrics=metrics(_TRAIN),
        evaluate_metrics=metrics(_EVALUATE),
        random_state=content["random_state"],
        client_metrics=metrics(_CLIENTS),
    )


def _write_file(path: Path, contents: Iterable[Sequence[Buffer]]) -> list[Place]:
    """Write a new file, sync it, and return where in it each of the contents is."""
    places = []
    offset = 0
    try:
        with path.open("xb", buffering=0) as file:
            for parts in contents:
                checksum = size = 0
                for part in parts:
                    write_all(file, part)
                    checksum = zlib.crc32(part, checksum)
                    size += len(part)
                places.append(Place(path, offset, size, checksum))
                offset += size
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return places


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(place: Place) -> None:
    checksum = left = 0
    try:
        with place.path.open("rb") as file:
            file.seek(place.offset_bytes)
            left = place.size_bytes
            while left and (data := file.read(min(left, _CHUNK_BYTES))):
                checksum = zlib.crc32(data, checksum)
                left -= len(data)
    except OSError as error:
        raise _damaged(place.path, error.strerror or str(error)) from error
    if left:
        raise _damaged(place.path, f"it ends {left} bytes too early")
    if checksum != place.checksum:
        raise _damaged(place.path, "its checksum is another one")


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path_text(path)} is damaged ({reason}), so that the run cannot be continued. Bring the file back "
        "from a copy if there is one, else start the run anew without --resume"
    )


def _numbers(place: Place) -> tuple[int, int, int]:
    return place.offset_bytes, place.size_bytes, place.checksum


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return json.dumps(fields[name]) if name in fields else "not set"
