"""The last finished round of a run: model, metrics, random state, and the states of all nodes.

    checkpoint.json     which round it is, and where in which file each state is
    7.model             the model, the metrics and the strategy's state after round 7
    4.states, 7.states  states that changed before the rounds were written

Files never change. A round's go into new ones and are synced, then an index that refers to them takes the
place of the one before, then files without a reference are deleted. So the folder holds a whole round
whatever ends the process. States go into one file for each round that changed any: a thousand small files
would have to be synced one by one. When less than half of a file is still in use, the states in it move to
the next one. Who writes has the run's lock (``in_use`` of :mod:`flower_gpu.apps.folder`).
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
from types import SimpleNamespace
from typing import Any, Final

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from flower_gpu import files
from flower_gpu.apps.folder import CHECKPOINT_INDEX as INDEX_NAME
from flower_gpu.errors import ConfigError
from flower_gpu.flower import record_bytes
from flower_gpu.flower.record_bytes import Buffer
from flower_gpu.flower.records import records_of
from flower_gpu.flower.resuming.states import FilePlace, StateStore, disk_error
from flower_gpu.flower.rounds import ResumableGrid, RoundState
from flower_gpu.flower.strategy_state import ANEW
from flower_gpu.printable import path_text

FORMAT_VERSION: Final = 4

_HEAD: Final = re.compile(rb"flower-gpu checkpoint, format (\d+), checksum (\d+)")  # the index's first line
_OURS: Final = re.compile(r"\d+\.(model|states)")
_ENTRY_BYTES: Final = 64  # of a state in the index, at most
_INDEX_BYTES: Final = 1 << 16  # of the rest of it, and of what files take beyond their sizes
# In the file with the model.
_MODEL, _TRAIN, _EVALUATE, _CLIENTS, _STRATEGY = "arrays", "train ", "evaluate ", "clients ", "strategy "

_Entry = tuple[int, int, int, int]  # of a state: the number of its file, where it is there, and its checksum


class Checkpoints:
    """Writes the state of a run after each round, and reads it.

    The store reads states from the checkpoint when they have left the memory, so the folder must stay as long
    as the run. ``identity`` is what a run must have in common with the one that it continues, for example
    ``{"number of nodes": 100}``.
    """

    def __init__(self, folder: Path, states: StateStore, identity: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._index = folder / INDEX_NAME
        self._states = states
        self._identity: dict[str, Any] = json.loads(json.dumps(dict(identity or {})))
        self._serial = 0  # of the newest files; no number is used twice
        self._entries: dict[int, _Entry] = {}  # of the states in the index, by partition
        self._used: set[Path] = set()  # files to which the index refers

    def write(self, state: RoundState) -> None:
        """Write a finished round in the place of the one before.

        Raises a FlowerGPUError if the disk is full or cannot be written to. The round before is still there.
        """
        model = _model_parts(state)
        size = sum(map(len, model)) + _INDEX_BYTES
        next_step = (
            "free space, and continue from the checkpoint, which is that of the round before"
            if self._used
            else "there is no checkpoint of an earlier one: free space, and start the run anew"
        )
        try:
            with self._states.held() as changed:
                size += sum(self._states.size_bytes(partition) for partition in changed)
                size += _ENTRY_BYTES * (len(self._entries) + len(changed))
                try:
                    self._write(state, model, changed)
                finally:
                    self._delete_unused()
        except OSError as error:
            text = f"Round {state.server_round} is finished but may not be written; {next_step}"
            raise disk_error(error, self._folder, size, text) from error

    def _write(self, state: RoundState, model: Sequence[Buffer], changed: Set[int]) -> None:
        """Write the files of a round, and let the index refer to them."""
        self._serial += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        entries = {number: entry for number, entry in self._entries.items() if number not in changed}
        in_use = Counter[int]()
        for serial, _, size, _ in entries.values():
            in_use[serial] += size
        sparse = {each for each, size in in_use.items() if 2 * size < self._states_file(each).stat().st_size}
        moving = [number for number in changed if self._states.size_bytes(number)]
        moving += [number for number, entry in entries.items() if entry[0] in sparse]
        written = {}
        if moving:
            contents = ([self._states.read(number)] for number in moving)
            found = _write_file(self._states_file(self._serial), contents)
            written = dict(zip(moving, found, strict=True))
        entries |= {number: (self._serial, *_numbers(place)) for number, place in written.items()}
        (of_model,) = _write_file(self._model_file(self._serial), [model])
        content = {
            "identity": self._identity,
            "serial": self._serial,
            "server_round": state.server_round,
            "random_state": state.random_state,
            "strategy": state.strategy,
            "first_model": state.first_model,
            "model": _numbers(of_model),
            "states": list(entries.items()),
        }
        text = json.dumps(content).encode()
        used = self._files_of(self._serial, entries)
        with files.replaced(self._index, has_one_writer=True) as new:
            head = f"flower-gpu checkpoint, format {FORMAT_VERSION}, checksum {zlib.crc32(text)}\n"
            new.write_bytes(head.encode() + text)
            _sync(new)
            _sync(self._folder)  # the names of the new files
            self._used |= used  # of either index, whatever happens now
        self._used, self._entries = used, entries
        self._states.saved(written)
        _sync(self._folder)

    def _states_file(self, serial: int) -> Path:
        return self._folder / f"{int(serial)}.states"

    def _model_file(self, serial: int) -> Path:
        return self._folder / f"{int(serial)}.model"

    def _files_of(self, serial: int, entries: Mapping[int, _Entry]) -> set[Path]:
        return {self._model_file(serial), *map(self._states_file, {entry[0] for entry in entries.values()})}

    def _delete_unused(self) -> None:
        """Delete the files to which no index refers."""
        with suppress(OSError):
            for path in list(self._folder.iterdir()):
                if path not in self._used and _OURS.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def read(self) -> RoundState | None:
        """Read the last finished round, and give the nodes their states of that time; None: there is none.

        Raises a ConfigError if it is of another run, was written by another version, or is damaged.
        """
        path = self._index
        if not path.exists():
            return None
        try:
            content = self._content()
            serial = int(content["serial"])
            model = FilePlace(self._model_file(serial), *map(int, content["model"]))
            entries: dict[int, _Entry] = {int(number): tuple(entry) for number, entry in content["states"]}
            places = {
                partition: FilePlace(self._states_file(number), *map(int, numbers))
                for partition, (number, *numbers) in entries.items()
            }
            for place in places.values():  # said now, and not by a client in the middle of a round
                path = place.path
                place.read()
            path = model.path
            found = _round_state(content, record_bytes.decode(model.read()))
        except ConfigError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise _damaged(path, str(error)) from error
        self._serial, self._entries = serial, entries
        self._used = self._files_of(serial, entries)
        self._states.saved(places)
        return found

    def _content(self) -> dict[str, Any]:
        """Return what the index tells; raises ConfigError if it is of another run or version."""
        head, _, text = self._index.read_bytes().partition(b"\n")
        match = _HEAD.fullmatch(head)
        if match is None:
            raise ValueError("it is no checkpoint of flower-gpu")
        if (version := int(match[1])) != FORMAT_VERSION:
            raise ConfigError(
                f"{path_text(self._index)} was written by another flower-gpu: its format is version "
                f"{version}, and this one reads version {FORMAT_VERSION}. Continue the run with the version "
                f"that began it, or start it anew {ANEW}"
            )
        if zlib.crc32(text) != int(match[2]):
            raise ValueError("its checksum is another one")
        content: dict[str, Any] = json.loads(text)
        self._compare(content["identity"])
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
                f"{'; '.join(differing)}. Give the earlier values, or start a new run {ANEW}"
            )


class KeptRounds:
    """The finished rounds of the first start of a strategy in an app; a later one begins anew, and has none.

    ``checkpoints``: None keeps none.
    ``found``: where the first start goes on.
    ``recorder``: of the run, a :class:`.Recorder`, if it has one.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None = None,
        found: RoundState | None = None,
        recorder: Any = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._found = found
        self._recorder = recorder
        self._starts = 0
        self._beside: list[ResumableGrid] = []

    def on(self, grid: Any) -> None:
        """Make a grid a :class:`.ResumableGrid`; one that keeps rounds already does that as well."""
        if isinstance(grid, ResumableGrid):
            self._beside = [SimpleNamespace(resumed=grid.resumed, finished_round=grid.finished_round)]
        grid.resumed, grid.finished_round = self.resumed, self.finished_round

    def resumed(self) -> RoundState | None:
        """Note a start; return the last round that is known here, or to the grid."""
        self._starts += 1
        known = [self._found if self._starts == 1 else None, *(each.resumed() for each in self._beside)]
        state = max(filter(None, known), key=lambda state: state.server_round, default=None)
        if state is not None and self._recorder is not None:
            self._recorder.run_resumed(state.server_round)
            self._recorder.model = state.arrays
        return state

    def finished_round(self, state: RoundState) -> None:
        """Write the checkpoint of a round, if the strategy's state can be written, and any client trained."""
        for each in self._beside:
            each.finished_round(state)
        # Else a run that goes on does the round again: it may be about to be ended for that.
        has_failed = self._recorder is not None and self._recorder.failed_round == state.server_round
        is_kept = self._starts <= 1 and state.strategy_state is not None and not has_failed
        if self._checkpoints is not None and is_kept:
            self._checkpoints.write(state)


def _model_parts(state: RoundState) -> list[Buffer]:
    """Return the global model, the metrics of all rounds so far, and the strategy's state."""
    records = RecordDict({_MODEL: state.arrays})
    for prefix, metrics in (
        (_TRAIN, state.train_metrics),
        (_EVALUATE, state.evaluate_metrics),
        (_CLIENTS, state.client_metrics),
    ):
        for server_round, record in metrics.items():
            records[f"{prefix}{server_round}"] = record
    for name, kept in (state.strategy_state or {}).items():
        records[f"{_STRATEGY}{name}"] = kept
    return record_bytes.encode_parts(records)


def _round_state(content: Mapping[str, Any], records: RecordDict) -> RoundState:
    def metrics(prefix: str) -> dict[int, MetricRecord]:
        found = records_of(records, MetricRecord).items()
        return {int(name[len(prefix) :]): record for name, record in found if name.startswith(prefix)}

    kept = {name[len(_STRATEGY) :]: record for name, record in records.items() if name.startswith(_STRATEGY)}
    return RoundState(
        server_round=int(content["server_round"]),
        # As Flower's own arrays: their bytes are known again, and written once for all workers of a round.
        arrays=ArrayRecord(dict(records_of(records, ArrayRecord)[_MODEL])),
        train_metrics=metrics(_TRAIN),
        evaluate_metrics=metrics(_EVALUATE),
        random_state=content["random_state"],
        client_metrics=metrics(_CLIENTS),
        strategy=content["strategy"],
        first_model=content.get("first_model", ""),
        strategy_state=RecordDict(kept),
    )


def _write_file(path: Path, contents: Iterable[Sequence[Buffer]]) -> list[FilePlace]:
    """Write a new file, sync it, and return where each of its contents, given in parts, is."""
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
        f"{path_text(path)} is damaged ({reason}), so that the run cannot be continued. Bring the file back "
        f"from a copy if there is one, else start the run anew {ANEW}"
    )


def _numbers(place: FilePlace) -> tuple[int, int, int]:
    return place.offset_bytes, place.size_bytes, place.checksum


def _shown(fields: Mapping[str, Any], name: str) -> str:
    return json.dumps(fields[name]) if name in fields else "not set"
