"""The folder that a simulated run leaves: metrics while it runs, the model and a summary at its end."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord
from flwr.common import Parameters, parameters_to_ndarrays
from numpy.typing import NDArray

from flower_gpu import files, trace
from flower_gpu.apps.failures import FILE_NAME
from flower_gpu.apps.folder import RunFolder, write_json
from flower_gpu.errors import ConfigError, shortened
from flower_gpu.flower.recording.recorder import Metrics, finite
from flower_gpu.printable import path_text
from flower_gpu.simulation.checkpoint import INDEX_NAME
from flower_gpu.simulation.record_files import disk_error
from flower_gpu.trace import Event
from flower_gpu.watch.fields import first_line, whole

_SMALL_BYTES = 4096  # of a line, a table or a summary, about

#: Kinds of lines in ``metrics.jsonl`` that are not a row of ``metrics.csv``.
_NO_ROWS = ("failure", "client", "resumed")

SAFETENSORS: Final = "model.safetensors"
NPZ: Final = "model.npz"

#: The types that every version of safetensors can write from NumPy.
_TYPES: Final = frozenset(
    {"bool", "float16", "float32", "float64"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
_NOT_A_NAME: Final = "__metadata__"  # what the header of a safetensors file has beside the arrays

_NOT_WRITTEN: Final = (
    "The final model is not written. Free space; the checkpoint, if there is one, has the model of the last "
    "finished round, and --resume goes on from it"
)
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")  # how safetensors, written in Rust, tells of one

_Arrays = dict[str, Callable[[], NDArray[Any]]]


class SimulationStoppedError(KeyboardInterrupt):
    """Ctrl-C during a run.

    ``folder``: where its results are.
    ``can_resume``: whether there is a checkpoint.
    """

    def __init__(self, folder: Path | None, can_resume: bool) -> None:
        super().__init__("the simulation was interrupted")
        self.folder = folder
        self.can_resume = can_resume


class ResultFolder:
    """The files of a run. Not safe to use from several threads.

    ``config``, ``summary``: what the run was started with, and the sums at its end; JSON.
    ``metrics``, ``table``: what happened, as JSON lines, and metrics by round as CSV.
    ``failures``: failed messages, with their tracebacks.
    ``log``: Flower's log lines, where they are not shown.
    ``checkpoint``: folder of what a run needs to go on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.summary = path / "config.json", path / "summary.json"
        self.metrics, self.table = path / "metrics.jsonl", path / "metrics.csv"
        self.failures, self.checkpoint = path / FILE_NAME, path / "checkpoint"
        self.log = RunFolder(path).log("run")
        self._rows: list[dict[str, Any]] = []

    @classmethod
    def create(cls, log_dir: Path, config: Mapping[str, Any]) -> ResultFolder:
        """Make a folder in ``log_dir`` for a new run; ``config`` is what it was started with, resolved."""
        folder = cls(RunFolder.create(log_dir).path)
        write_json(folder.config, finite(config))
        return folder

    @classmethod
    def reopen(cls, path: Path) -> ResultFolder:
        """Open the folder of an earlier run, to go on with it; it must have a checkpoint."""
        folder = cls(path.expanduser().resolve())
        if not folder.path.is_dir():
            raise ConfigError(f"--resume {path_text(path)}: there is no such folder")
        if not folder.config.is_file():
            raise ConfigError(
                f"--resume {path_text(path)}: it has no {folder.config.name}; the folder of a run of "
                "`flower-gpu simulate` is needed, such as runs/2026-01-31_12-00-00"
            )
        if not folder.can_resume:
            raise ConfigError(
                f"--resume {path_text(path)}: it has no checkpoint. One is written after each round of "
                "Flower's own strategies and of flower_gpu's FedAvg: start this run anew"
            )
        return folder

    @property
    def can_resume(self) -> bool:
        """Whether there is a checkpoint."""
        return (self.checkpoint / INDEX_NAME).is_file()

    def read_config(self) -> dict[str, Any]:
        """Return what the run was started with."""
        try:
            config = json.loads(self.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.config} cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{self.config} is no JSON object")
        return config

    def cut(self, server_round: int) -> list[Event]:
        """Take away what the run does again, and a torn line; return the events of the lines that stay.

        It does later rounds again, and what belongs to no round: the app begins anew, up to its strategy.
        """
        numbers = ((line, whole(line.get("round"))) for line in self._read())
        kept = [line for line, number in numbers if number is not None and number <= server_round]
        with files.replaced(self.metrics, has_one_writer=True) as new:
            new.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._rows = [line for line in kept if line.get("kind") not in _NO_ROWS]
        return [event for line in kept if (event := _event_of(line)) is not None]

    def on_event(self, event: Event) -> None:
        """Write an event down, if it is one to keep. A full disk is an error that says what to do."""
        try:
            self._keep(event)
        except OSError as error:
            text = "Free space, and continue with --resume if there is a checkpoint"
            raise disk_error(error, self.path, _SMALL_BYTES, text) from error

    def _keep(self, event: Event) -> None:
        server_round = event.get("round")
        match event["event"]:
            case "strategy_resumed":
                self._add({"round": server_round, "kind": "resumed"})
            case "reply":
                whose = {"type": event["task"], "client": event["node"]}
                if event["error"] is not None:
                    error = shortened(first_line(event["error"]))
                    self._add({"round": server_round, "kind": "failure", **whose, "error": error})
                elif event["metrics"] and not event["aggregated"]:
                    metrics = finite(event["metrics"])
                    self._add({"round": server_round, "kind": "client", **whose, "metrics": metrics})
            case "round_finished":
                names = ("clients", "failed", "messages", "seconds")
                told = {name: event[name] for name in names}
                metrics = finite(event["metrics"])
                self._add_row({"round": server_round, "kind": event["task"], **told, "metrics": metrics})

    def finish(self, model: ArrayRecord | Parameters | None, summary: Mapping[str, Any]) -> None:
        """Write what is there at the end only. A full disk is an error that says what to do."""
        written = None
        try:
            self._write_table()
            try:
                written = write_model(model, self.path)
            finally:  # where the model does not fit, the summary may
                name = None if written is None else written.name
                write_json(self.summary, finite({**summary, "model": name}))
        except OSError as error:
            raise disk_error(error, self.path, _SMALL_BYTES, "Free space for the results") from error

    def _add_row(self, row: dict[str, Any]) -> None:
        if self._rows and self._rows[-1]["round"] != row["round"]:
            self._write_table()  # a round is over
        self._add(row)
        self._rows.append(row)

    def _add(self, line: Mapping[str, Any]) -> None:
        with open(self.metrics, "a", encoding="utf-8") as file:  # what a killed run has found out stays
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def _read(self) -> Iterator[dict[str, Any]]:
        try:
            text = self.metrics.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        for line in text.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found

    def _write_table(self) -> None:
        if not self._rows and not self.table.exists():
            return
        names = list(dict.fromkeys(name for row in self._rows for name in row["metrics"]))
        rows = [["round", "kind", *names]]
        for row in self._rows:
            values = [_cell(row["metrics"][name]) if name in row["metrics"] else "" for name in names]
            rows.append(["" if row["round"] is None else row["round"], row["kind"], *values])
        # Before Python 3.13 the module quotes a carriage return only if it is part of the ends of its lines.
        is_odd = any("\r" in str(cell) for row in rows for cell in row)
        text = StringIO()
        csv.writer(
            text, lineterminator="\n", quoting=csv.QUOTE_ALL if is_odd else csv.QUOTE_MINIMAL
        ).writerows(rows)
        with files.replaced(self.table, has_one_writer=True) as new:
            new.write_text(text.getvalue(), encoding="utf-8")


def _event_of(line: Mapping[str, Any]) -> Event | None:
    """Return the event that a line of ``metrics.jsonl`` was written for, as far as a summary needs it."""
    match kind := line.get("kind"):
        case "failure":
            whose = {"task": line.get("type"), "node": line.get("client")}
            return trace.make("reply", round=line.get("round"), **whose, error=str(line.get("error")))
        case "client" | "resumed":
            return None
        case _:
            names = ("round", "messages", "failed", "seconds", "metrics")
            told = {name: line.get(name) for name in names}
            return trace.make("round_finished", task=str(kind), **told)


def _cell(value: Metrics | Any) -> Any:
    if value is None:
        return "nan"
    return json.dumps(value) if isinstance(value, list | bool) else value


def write_model(model: ArrayRecord | Parameters | None, folder: Path) -> Path | None:
    """Write a model: with safetensors if that is installed and knows all the types, else as ``.npz``.

    ``model``: the arrays of ``Parameters`` are called ``"0"``, ``"1"`` and so on.
    ``folder``: where the file goes. A model that is there already is replaced, in one step.
    Returns the file; None if there are no arrays.
    Raises FlowerGPUError if the disk is full or cannot be written to.
    """
    arrays = _arrays(model)
    if not arrays:
        return None
    path = folder / SAFETENSORS
    try:
        if not _write(path, arrays, _write_safetensors):
            path = folder / NPZ
            _write(path, arrays, _write_npz)
    except OSError as error:
        size = sum(np.asarray(read()).nbytes for read in arrays.values())
        raise disk_error(error, folder, size, _NOT_WRITTEN) from error
    for other in {SAFETENSORS, NPZ} - {path.name}:
        (folder / other).unlink(missing_ok=True)  # of the same run before it was resumed
    return path


def model_sha256(model: ArrayRecord | Parameters | None) -> str | None:
    """Return the SHA-256 of a model, as 64 hexadecimal digits; None if there are no arrays.

    Of each array, in the order of the names, a line with name, type and shape, and then its elements in C
    order, little-endian. docs/reference/simulate.md has the same for a file with a model.

    ``model``: as for :func:`write_model`.
    """
    arrays = _arrays(model)
    if not arrays:
        return None
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name]())
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _arrays(model: ArrayRecord | Parameters | None) -> _Arrays:
    if model is None:
        return {}
    if isinstance(model, Parameters):
        if model.tensor_type != "numpy.ndarray":
            # Bytes of some framework's own: kept as they are.
            found = [np.frombuffer(tensor, np.uint8) for tensor in model.tensors]
        else:
            found = parameters_to_ndarrays(model)
        return {str(number): partial(np.asarray, array) for number, array in enumerate(found)}
    return {name: array.numpy for name, array in model.items()}


def _write(path: Path, arrays: _Arrays, write: Callable[[Path, _Arrays], bool]) -> bool:
    with files.replaced(path, has_one_writer=True) as new:
        is_written = write(new, arrays)
        if not is_written:
            new.unlink()  # the file of before stays
    return is_written


def _write_safetensors(path: Path, arrays: _Arrays) -> bool:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError:
        return False
    found = {name: read() for name, read in arrays.items()}
    if _NOT_A_NAME in found or any(array.dtype.name not in _TYPES for array in found.values()):
        return False
    # It writes what lies in memory, whatever the order of the elements.
    try:
        save_file({name: np.require(array, requirements="C") for name, array in found.items()}, path)
    except SafetensorError as error:
        if code := _OS_ERROR.search(str(error)):
            raise OSError(int(code[1]), os.strerror(int(code[1])), path) from error
        raise
    return True


def _write_npz(path: Path, arrays: _Arrays) -> bool:
    # As numpy.savez, which cannot take a name such as "file", and would have all arrays in memory.
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for name, read in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(read()), allow_pickle=False)
    return True
