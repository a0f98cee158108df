"""The last finished round of a run: model, metrics, random state, and the states of all nodes.

    checkpoint.sqlite   which round it is, and where in which file each state is
    7.model             the model and the metrics of round 7
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flwr.app import ArrayRecord, MetricRecord, RecordDict

from flower_gpu import files
from flower_gpu.errors import ConfigError, FlowerGPUError
from flower_gpu.flower.records import records_of
from flower_gpu.printable import path_text
from flower_gpu.simulation import record_bytes
from flower_gpu.simulation.places import Place, disk_error, write_all
from flower_gpu.simulation.record_bytes import Buffer
from flower_gpu.simulation.states import StateStore

if TYPE_CHECKING:
    from flower_gpu.flower.rounds import RoundState

INDEX_NAME: Final = "checkpoint.sqlite"
FORMAT_VERSION: Final = 2
#: By what a folder is known to have a checkpoint, of this format or of the one before.
INDEX_NAMES: Final = (INDEX_NAME, "checkpoint.json")

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
_CHUNK_BYTES: Final = 1 << 20
_ENTRY_BYTES: Final = 64  # of a state in the index, at most
_TABLES_BYTES: Final = 3 * 4096  # of an index that is empty
_BLOCK_BYTES: Final = 4096  # of a file system: files take whole ones
# In the file with the model.
_MODEL, _TRAIN, _EVALUATE, _CLIENTS = "arrays", "train ", "evaluate ", "clients "


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
        size = _on_disk(sum(map(len, model)))
        is_first = not self._serial
        try:
            if is_first:
                self._create()
            with self._states.held() as changed:
                database = self._open()
                size += _on_disk(sum(map(self._states.size_bytes, changed)))
                rows = _ENTRY_BYTES * len(changed) + len(json.dumps(state.random_state))
                size += 2 * _on_disk(_TABLES_BYTES + rows)  # in the index, and pages of before in its journal
                database.execute("BEGIN IMMEDIATE")
                self._check_is_ours(database)
                try:
                    used = self._write(database, state, model, changed)
                except BaseException:
                    self._give_up(database)
                    raise
        except (OSError, sqlite3.Error) as error:
            next_step = (
                "there is no checkpoint of an earlier one: free space, and start the run anew"
                if is_first
                else "free space, and continue from the checkpoint, which is that of the round before"
            )
            text = f"Round {state.server_round} is finished but may not be written; {next_step}"
            raise disk_error(_os_error(error), self._folder, size, text) from error
        self._delete_all_but(used)

    def read(self) -> RoundState | None:
        """Read the last finished round, and give the nodes their states of that time; None: there is none.

        Raises a ConfigError if it is of another run, was written by another version, or is damaged.
        """
        self.close()
        if not self._index.exists():
            earlier = self._folder / INDEX_NAMES[1]
            if earlier.exists():
                raise ConfigError(
                    f"{path_text(earlier)} was written by an earlier flower-gpu: its format is version 1, "
                    f"and this one reads version {FORMAT_VERSION}. Continue the run with the version that "
                    "began it, or start it anew without --resume"
                )
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
                model = Place(self._folder / f"{serial}.model", *map(int, content["model"]))
                places = {
                    int(partition): Place(self._folder / f"{int(number)}.states", *map(int, numbers))
                    for partition, number, *numbers in rows
                }
        except FlowerGPUError:
            raise
        except (OSError, sqlite3.Error, ValueError, TypeError, KeyError, OverflowError) as error:
            raise _damaged(self._index, str(error)) from error
        for place in (model, *places.values()):  # said now, and not by a client in the middle of a round
            _check(place)
        found = _round_state(content, record_bytes.decode(model.read()))
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
    ) -> set[str]:
        """Write the files of a round, let the index refer to them, and return the names of all used files."""
        serial = self._serial + 1
        database.executemany("DELETE FROM states WHERE partition = ?", ((number,) for number in changed))
        path = self._folder / f"{serial}.states"
        moved = self._in_sparse_files(database)
        partitions = [number for number in (*changed, *moved) if self._states.size_bytes(number)]
        places = _write_states(path, partitions, self._states.read) if partitions else {}
        database.executemany(
            "INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?)",
            ((partition, serial, *_numbers(place)) for partition, place in places.items()),
        )
        place = _write_file(self._folder / f"{serial}.model", model)
        content = {
            "identity": self._identity,
            "serial": serial,
            "server_round": state.server_round,
            "random_state": state.random_state,
            "model": _numbers(place),
            "sums": database.execute(_SUMS).fetchone(),
        }
        text = json.dumps(content)
        database.execute("DELETE FROM round")
        database.execute("INSERT INTO round VALUES (?, ?)", (text, zlib.crc32(text.encode())))
        used = {f"{number}.states" for (number,) in database.execute("SELECT DISTINCT serial FROM states")}
        _sync(self._folder)  # the names of the new files
        database.execute("COMMIT")
        _sync(self._folder / f"{INDEX_NAME}-journal")
        self._serial = serial
        self._states.saved(places)
        return {f"{serial}.model", *used}

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
        """Delete the files of a round that could not be written, if the index does not refer to them."""
        with contextlib.suppress(sqlite3.Error, OSError):
            if database.in_transaction:
                database.execute("ROLLBACK")
            content = _round(database)
            if content is not None and content["serial"] > self._serial:
                self._serial += 1  # the error came after the end of the transaction
                self.close()
                return
            for suffix in ("model", "states"):
                (self._folder / f"{self._serial + 1}.{suffix}").unlink(missing_ok=True)
            if content is None:
                self._index.unlink()
        self.close()

    def _check_format(self, database: sqlite3.Connection) -> None:
        if _pragma(database, "application_id") != _APPLICATION:
            raise ValueError("it is no checkpoint of flower-gpu")
        version = _pragma(database, "user_version")
        if version > FORMAT_VERSION:
            raise ConfigError(
                f"{path_text(self._index)} was written by a newer flower-gpu: its format is version "
                f"{version}, and this one reads version {FORMAT_VERSION}. Continue the run with the version "
                "that began it"
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
                f"{'; '.join(differing)}. Give the same as then, or start a new run without --resume"
            )

    def _delete_all_but(self, used: Set[str]) -> None:
        with contextlib.suppress(OSError):
            for path in list(self._folder.iterdir()):
                if path.name not in used and _OURS.fullmatch(path.name):
                    path.unlink(missing_ok=True)


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
    """Return what the index says of its round; None where no round was finished."""
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


def _write_file(path: Path, parts: Iterable[Buffer]) -> Place:
    """Write a new file, sync it, and return where its content is."""
    with path.open("wb", buffering=0) as file:
        checksum = 0
        for part in parts:
            write_all(file, part)
            checksum = zlib.crc32(part, checksum)
        os.fsync(file.fileno())
        return Place(path, 0, file.tell(), checksum)


def _write_states(path: Path, partitions: Iterable[int], read: Callable[[int], bytes]) -> dict[int, Place]:
    places: dict[int, Place] = {}

    def contents() -> Iterator[bytes]:
        offset = 0
        for partition in partitions:
            data = read(partition)
            places[partition] = Place(path, offset, len(data), zlib.crc32(data))
            offset += len(data)
            yield data

    _write_file(path, contents())
    return places


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
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
    except (OSError, ValueError) as error:
        raise _damaged(place.path, str(error)) from error
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
