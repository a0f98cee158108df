"""The last finished round of a run: model, metrics, random state, and the states of all nodes.

    checkpoint.sqlite   which round it is, and where in which file each state is
    7.model             the model, the metrics and the strategy's state after round 7
    4.states, 7.states  states that changed before the rounds were written

Files never change. A round's go into new ones and are synced, then one transaction lets the index refer to
them, then files without a reference are deleted. So the folder holds a whole round whatever ends the process.
States go into one file for each round that changed any: a thousand small files would have to be synced one by
one. When less than half of a file is still in use, the states in it move to the next one.

SQLite keeps a rollback journal, since its write-ahead log fails on network folders. With ``synchronous``
NORMAL it syncs the journal before the index, and the index before the journal is truncated. The truncated
journal is synced here, before files of the round before are deleted: else a journal that comes back after a
power failure would undo the round. FULL would sync the journal once more, and a deleted journal the folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from flower_gpu import files
from flower_gpu.apps.folder import CHECKPOINT_INDEX as INDEX_NAME
from flower_gpu.errors import ConfigError, FlowerGPUError
from flower_gpu.flower import record_bytes
from flower_gpu.flower.record_bytes import Buffer
from flower_gpu.flower.records import records_of
from flower_gpu.flower.resuming.states import FilePlace, StateStore, disk_error
from flower_gpu.flower.rounds import RoundState
from flower_gpu.flower.strategy_state import ANEW
from flower_gpu.printable import path_text

FORMAT_VERSION: Final = 3

_APPLICATION: Final = 0x46475043  # in the database's header: it is one of these
_TABLES: Final = (
    "CREATE TABLE round (content TEXT, checksum INTEGER)",
    "CREATE TABLE states (partition INTEGER PRIMARY KEY, serial INTEGER, offset INTEGER, size INTEGER, "
    "checksum INTEGER)",
)
_SUMS: Final = (
    "SELECT count(*), sum(partition), sum(serial), sum(offset), sum(size), sum(checksum) FROM states"
)
_OURS: Final = re.compile(r"\d+\.(model|states)")
_ENTRY_BYTES: Final = 128  # of a state in the index and in its journal, at most
_INDEX_BYTES: Final = 1 << 16  # of the rest of both, and of what files take beyond their sizes
# In the file with the model.
_MODEL, _TRAIN, _EVALUATE, _CLIENTS, _STRATEGY = "arrays", "train ", "evaluate ", "clients ", "strategy "


class Checkpoints:
    """Writes the state of a run after each round, and reads it.

    The store reads states from the checkpoint when they have left the memory, so the folder must stay as long
    as the run. ``identity`` is what a run must have in common with the one that it continues, for example
    ``{"number of nodes": 100}``.
    """

    def __init__(self, folder: Path, states: StateStore, identity: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._states = states
        self._identity: dict[str, Any] = json.loads(json.dumps(dict(identity or {})))
        self._serial = 0  # of the round that this object has written or read last
        self._database: sqlite3.Connection | None = None  # open between writes: opening syncs the folder

    @property
    def _index(self) -> Path:
        return self._folder / INDEX_NAME

    def write(self, state: RoundState) -> None:
        """Write a finished round in the place of the one before.

        Raises a FlowerGPUError if the disk is full or cannot be written to, or if another process has written
        into the folder. The round before is still there.
        """
        model = _model_parts(state)
        size = sum(map(len, model)) + _INDEX_BYTES
        is_first = not self._serial
        try:
            if is_first:
                self._create()
            with self._states.held() as changed:
                size += sum(_ENTRY_BYTES + self._states.size_bytes(partition) for partition in changed)
                database = self._open()
                database.execute("BEGIN IMMEDIATE")
                self._check_is_ours(database)
                try:
                    self._write(database, state, model, changed)
                except BaseException:
                    self._give_up(database)
                    raise
                self._delete_unused(database)
        except (OSError, sqlite3.Error) as error:
            next_step = (
                "there is no checkpoint of an earlier one: free space, and start the run anew"
                if is_first
                else "free space, and continue from the checkpoint, which is that of the round before"
            )
            text = f"Round {state.server_round} is finished but may not be written; {next_step}"
            raise disk_error(_os_error(error), self._folder, size, text) from error

    def read(self) -> RoundState | None:
        """Read the last finished round, and give the nodes their states of that time; None: there is none.

        Raises a ConfigError if it is of another run, was written by another version, or is damaged.
        """
        self.close()
        if not self._index.exists():
            return None
        try:
            with contextlib.closing(_connect(self._index)) as database:
                self._check_format(database)
                content = _round(database)
                rows = database.execute("SELECT * FROM states").fetchall()
                if content is None:
                    return None
                if content["sums"] != list(database.execute(_SUMS).fetchone()):
                    raise ValueError("the states in it are not those of the round")
                self._compare(content["identity"])
                serial = int(content["serial"])
                model = FilePlace(self._folder / f"{serial}.model", *map(int, content["model"]))
                places = {
                    int(partition): FilePlace(self._folder / f"{int(number)}.states", *map(int, numbers))
                    for partition, number, *numbers in rows
                }
        except FlowerGPUError:
            raise
        except (OSError, sqlite3.Error, ValueError, TypeError, KeyError, OverflowError) as error:
            raise _damaged(self._index, str(error)) from error
        for place in (model, *places.values()):  # said now, and not by a client in the middle of a round
            try:
                data = place.read()
            except (OSError, ValueError) as error:
                raise _damaged(place.path, str(error)) from error
            if place is model:
                found = _round_state(content, record_bytes.decode(data))
        self._serial = serial
        self._states.saved(places)
        return found

    def _create(self) -> None:
        """Make an index without a round, which the first round syncs."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        with (
            files.replaced(self._index, has_one_writer=True) as new,
            contextlib.closing(sqlite3.connect(new, isolation_level=None)) as database,
        ):
            database.execute("PRAGMA synchronous = OFF")
            database.execute("PRAGMA journal_mode = OFF")
            database.execute(f"PRAGMA application_id = {_APPLICATION}")
            database.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
            for table in _TABLES:
                database.execute(table)

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            self._database = _connect(self._index)
        return self._database

    def close(self) -> None:
        """Close the index."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _check_is_ours(self, database: sqlite3.Connection) -> None:
        content = _round(database)
        found = content["serial"] if content is not None else 0
        if found != self._serial:
            self.close()
            raise FlowerGPUError(
                f"{path_text(self._index)} was written by another process: it has {found} rounds, and this "
                f"run has written {self._serial}. Two runs cannot share a folder: end one of them"
            )

    def _write(
        self, database: sqlite3.Connection, state: RoundState, model: Sequence[Buffer], changed: Set[int]
    ) -> None:
        """Write the files of a round, and let the index refer to them."""
        serial = self._serial + 1
        database.executemany("DELETE FROM states WHERE partition = ?", ((number,) for number in changed))
        partitions = [
            number
            for number in (*changed, *self._in_sparse_files(database))
            if self._states.size_bytes(number)
        ]
        places = {}
        if partitions:
            found = _write_file(
                self._folder / f"{serial}.states", ([self._states.read(number)] for number in partitions)
            )
            places = dict(zip(partitions, found, strict=True))
        database.executemany(
            "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?)",
            ((partition, serial, *_numbers(place)) for partition, place in places.items()),
        )
        (written,) = _write_file(self._folder / f"{serial}.model", [model])
        content = {
            "identity": self._identity,
            "serial": serial,
            "server_round": state.server_round,
            "random_state": state.random_state,
            "strategy": state.strategy,
            "first_model": state.first_model,
            "model": _numbers(written),
            "sums": database.execute(_SUMS).fetchone(),
        }
        text = json.dumps(content)
        database.execute("DELETE FROM round")
        database.execute("INSERT INTO round VALUES (?, ?)", (text, zlib.crc32(text.encode())))
        _sync(self._folder)  # the names of the new files
        database.execute("COMMIT")
        _sync(self._folder / f"{INDEX_NAME}-journal")
        self._serial = serial
        self._states.saved(places)

    def _in_sparse_files(self, database: sqlite3.Connection) -> list[int]:
        """Return the partitions whose states are in files that are mostly out of use."""
        in_use = database.execute("SELECT serial, sum(size) FROM states GROUP BY serial").fetchall()
        return [
            partition
            for serial, size in in_use
            if 2 * size < (self._folder / f"{serial}.states").stat().st_size
            for (partition,) in database.execute("SELECT partition FROM states WHERE serial = ?", (serial,))
        ]

    def _give_up(self, database: sqlite3.Connection) -> None:
        """Delete the files of a round that could not be written."""
        with contextlib.suppress(sqlite3.Error, OSError):
            if database.in_transaction:
                database.execute("ROLLBACK")
            content = _round(database)
            serial = 0 if content is None else content["serial"]
            if serial == self._serial:  # else the error came after the commit, and maybe before the sync
                self._delete_unused(database)
            self._serial = serial
            if content is None:
                self._index.unlink()
        self.close()

    def _delete_unused(self, database: sqlite3.Connection) -> None:
        """Delete the files that the index does not refer to."""
        serials = database.execute("SELECT DISTINCT serial FROM states")
        used = {f"{self._serial}.model", *(f"{number}.states" for (number,) in serials)}
        with contextlib.suppress(OSError):
            for path in list(self._folder.iterdir()):
                if path.name not in used and _OURS.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def _check_format(self, database: sqlite3.Connection) -> None:
        if _pragma(database, "application_id") != _APPLICATION:
            raise ValueError("it is no checkpoint of flower-gpu")
        version = _pragma(database, "user_version")
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{path_text(self._index)} was written by another flower-gpu: its format is version "
                f"{version}, and this one reads version {FORMAT_VERSION}. Continue the run with the version "
                f"that began it, or start it anew {ANEW}"
            )
        found = database.execute("SELECT sql FROM sqlite_master").fetchall()
        if found != [(table,) for table in _TABLES]:
            raise ValueError("it has other tables than a checkpoint has")
        if (problem := _pragma(database, "quick_check(1)")) != "ok":
            raise ValueError(str(problem))

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


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=rw"
    # Rounds may end in different threads, one after the other.
    database = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA journal_mode = TRUNCATE")
    except BaseException:
        database.close()
        raise
    return database


def _pragma(database: sqlite3.Connection, name: str) -> Any:
    return database.execute(f"PRAGMA {name}").fetchone()[0]


def _round(database: sqlite3.Connection) -> dict[str, Any] | None:
    """Return the index's facts of its round; None where no round was finished."""
    found = database.execute("SELECT content, checksum FROM round").fetchone()
    if found is None:
        return None
    text, checksum = found
    if zlib.crc32(text.encode()) != checksum:
        raise ValueError("its checksum is another one")
    content: dict[str, Any] = json.loads(text)
    return content


def _os_error(error: OSError | sqlite3.Error) -> OSError:
    if isinstance(error, OSError):
        return error
    codes = {
        sqlite3.SQLITE_FULL: (errno.ENOSPC, "No space left on device"),
        sqlite3.SQLITE_BUSY: (errno.EBUSY, "another process has locked the checkpoint"),
    }
    # The lowest byte is the code itself, the others say more of it.
    return OSError(*codes.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, (errno.EIO, str(error))))


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
        server_round=content["server_round"],
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
