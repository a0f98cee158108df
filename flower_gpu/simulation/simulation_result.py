"""What a simulation returns, or raises when it is interrupted; its final model as a file of safetensors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import WARNING
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.common import Parameters, parameters_to_ndarrays
from flwr.common.logger import log
from numpy.typing import NDArray

from flower_gpu import files
from flower_gpu.apps.folder import RunFolder, short
from flower_gpu.errors import ConfigError
from flower_gpu.flower.resuming.states import disk_error
from flower_gpu.watch.fields import metrics_text
from flower_gpu.watch.spans import RoundPart


class SimulationStoppedError(KeyboardInterrupt):
    """Ctrl-C during a run.

    ``folder``: where its results are.
    ``can_resume``: whether there is a checkpoint.
    """

    def __init__(self, folder: Path | None, can_resume: bool) -> None:
        super().__init__("the simulation was interrupted")
        self.folder = folder
        self.can_resume = can_resume


@dataclass(frozen=True, repr=False)
class SimulationResult:
    """What a simulation leaves. As the last value of a notebook's cell, it shows its rounds.

    Attributes
    ----------
    context : Context
        The ServerApp's, as the app has left it.
    model : ArrayRecord, Parameters or None
        The final global model, if the app has used a strategy.
    summary : dict
        What came of the run, as in ``result.json``.
    folder : Path or None
        Where the results are.
    app : str
        The app's name; ``"app"`` where two components were given.
    history : sequence of RoundPart
        What came of the messages of each kind in each round, in the order of the run: ``round``, ``task``,
        ``messages``, ``failed``, ``seconds``, ``metrics`` (the numbers) and ``told`` (all metrics).
    """

    context: Context
    model: ArrayRecord | Parameters | None
    summary: Mapping[str, Any]
    folder: Path | None
    app: str = "app"
    history: Sequence[RoundPart] = ()

    @property
    def metrics(self) -> Any:
        """Metrics by round: a pandas DataFrame if pandas is installed, else a list of dictionaries.

        A row is what came of the messages of one kind in one round, with ``round``, ``task``, ``messages``,
        ``failed``, ``seconds``, and a column for each metric. A metric that has one of these names is called
        ``metrics.round``, and so on.
        """
        rows = []
        for part in self.history:
            row: dict[str, Any] = {
                "round": part.round,
                "task": part.task,
                "messages": part.messages,
                "failed": part.failed,
                "seconds": part.seconds,
            }
            own = {f"metrics.{name}" if name in row else name: value for name, value in part.told.items()}
            rows.append({**row, **own})
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def report(self) -> Path:
        """Write the HTML report into the run's folder, as ``flower-gpu report`` does.

        Returns
        -------
        Path
            The page. As the last value of a notebook's cell, it shows itself.

        Raises
        ------
        ConfigError
            If the run has no folder.
        """
        from flower_gpu.watch.notebook import ReportPath
        from flower_gpu.watch.report.page import write_report

        if self.folder is None:
            raise ConfigError(
                "there is no report of this run: it is made from the folder of a run, and with log_dir=None "
                'there is none. Run it with simulate(..., log_dir="runs")'
            )
        return ReportPath(write_report(self.folder))

    def __repr__(self) -> str:
        told = self.summary
        of = f" of {told['num_rounds']}" if told.get("num_rounds") else ""
        parts = [
            self.app,
            f"{told['clients']} clients",
            f"{told['rounds_finished']}{of} rounds",
            told["outcome"],
        ]
        if told.get("metrics"):
            task, metrics = list(told["metrics"].items())[-1]
            parts.append(f"{task}: {text}" if (text := metrics_text(metrics)) else "")
        if self.folder is not None:
            parts.append(short(self.folder))
        return f"<SimulationResult {'; '.join(part for part in parts if part)}>"

    def _repr_html_(self) -> str:
        from flower_gpu.watch.notebook import result_html

        folder = "" if self.folder is None else short(self.folder)
        return result_html(self.app, self.summary, folder, self.history)


#: Names of the format for NumPy's.
_TYPES: Final = {
    **{"bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64", "bfloat16": "BF16"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
_NOT_A_NAME: Final = "__metadata__"  # what the header of such a file has beside the arrays
_ALIGNMENT: Final = 8
_NOT_WRITTEN: Final = (
    "The final model is not written. Free space; the checkpoint, if there is one, has the model of the last "
    "finished round, and --resume goes on from it"
)

_Arrays = dict[str, Callable[[], NDArray[Any]]]


def write_model(model: ArrayRecord | Parameters | None, folder: RunFolder) -> str | None:
    """Write a model in the place of the one that is there; return the file's name, None if there is none.

    The arrays of ``Parameters`` are called ``"0"``, ``"1"`` and so on. A model with arrays that the format
    does not know is not written, which a warning says.
    Raises FlowerGPUError if the disk is full or cannot be written to.
    """
    arrays = _arrays(model)
    if not arrays:
        return None
    told = {name: ((array := read()).dtype, array.shape, array.nbytes) for name, read in arrays.items()}
    for name, (dtype, *_) in told.items():
        if name == _NOT_A_NAME or dtype.name not in _TYPES:
            text = "The final model is not written: a file of safetensors cannot hold %r, of type %s"
            log(WARNING, text, name, dtype)
            folder.model.unlink(missing_ok=True)  # of the same run before it was resumed
            return None
    header: dict[str, Any] = {}
    size = 0
    for name in sorted(told, key=lambda name: -told[name][0].itemsize):  # so that each array is aligned
        dtype, shape, nbytes = told[name]
        header[name] = {"dtype": _TYPES[dtype.name], "shape": shape, "data_offsets": [size, size + nbytes]}
        size += nbytes
    head = json.dumps(header).encode()
    head = head.ljust(math.ceil(len(head) / _ALIGNMENT) * _ALIGNMENT)
    try:
        with files.replaced(folder.model, has_one_writer=True) as new, new.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name in header:
                file.write(_bytes(arrays[name]()))
    except OSError as error:
        raise disk_error(error, folder.path, size, _NOT_WRITTEN) from error
    return folder.model.name


def model_sha256(model: ArrayRecord | Parameters | None) -> str | None:
    """Return the SHA-256 of a model, as 64 hexadecimal digits; None if there are no arrays.

    Of each array, in the order of the names, a line with name, type and shape, and then its elements in C
    order, little-endian. docs/reference/result.md has the same for a file with a model.
    """
    arrays = _arrays(model)
    if not arrays:
        return None
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]()
        dtype = array.dtype.newbyteorder("<")
        digest.update(f"{name} {dtype.str} {array.shape}\n".encode())
        digest.update(_bytes(array))
    return digest.hexdigest()


def _bytes(array: NDArray[Any]) -> bytes:
    """Return an array's elements in C order, little-endian."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _arrays(model: ArrayRecord | Parameters | None) -> _Arrays:
    """Return what reads each array: not all of them need be in memory once more."""
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
