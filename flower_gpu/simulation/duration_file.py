"""Where learned durations are kept: a file for each app and number of clients, in the state folder.

Runs of an app may learn at the same time: a writer holds a lock, adds its figures to those of the file, and
replaces the file as a whole, so that a reader finds the old one or the new one, without a lock.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

from flower_gpu import files
from flower_gpu.errors import FlowerGPUError
from flower_gpu.workers import state_folder

FOLDER: Final = "durations"
VERSION: Final = 1

_MOST_FILES: Final = 100  # the oldest are forgotten
_MOST_CLIENTS: Final = 100_000  # of a kind; the same
_MOST: Final = 1e15  # seconds or examples
_LOCK: Final = ".lock"

T = TypeVar("T")

#: Numbers by client.
Numbers = Mapping[int, float]


@dataclass(frozen=True)
class Known:
    """What is known of an app's clients."""

    examples: Mapping[str, Numbers] = field(default_factory=dict)  # by kind of message
    seconds: Mapping[str, Mapping[str, Numbers]] = field(default_factory=dict)  # by kind, then by device


class DurationFile:
    """The file of one app.

    Parameters
    ----------
    app : str
        The app's name.
    clients : int
        How many partitions there are: one of ten has other data than one of a hundred.
    folder : Path, optional
        Where the file is; default: ``durations`` in the state folder.
    """

    def __init__(self, app: str, clients: int, folder: Path | None = None) -> None:
        self._app, self._clients = app, clients
        self._folder = folder
        self._is_own_folder = folder is None
        name = hashlib.blake2b(f"{clients} {app}".encode(errors="surrogatepass"), digest_size=12).hexdigest()
        self._name = f"{name}.json"

    @property
    def path(self) -> Path:
        """The file."""
        return self._in() / self._name

    def read(self) -> Known:
        """Return what is in the file; nothing if it is not there, not ours, or others could write it."""
        try:
            if self._is_own_folder and state_folder.state_dir_problem() is not None:
                return Known()
            return _parsed(self.path.read_bytes())
        except (OSError, ValueError):  # all can be learned anew
            return Known()

    def write(self, known: Known) -> None:
        """Add to the file what is known now. If that fails, a warning says so."""
        try:
            if self._is_own_folder:
                state_folder.made_state_dir()
            folder = self._in()
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            with files.locked(folder / _LOCK):
                merged = _merged(self.read(), known)
                with files.replaced(self.path, mode=0o600, has_one_writer=True) as new:
                    new.write_bytes(self._written(merged))
                _forget_oldest(folder)
        except (OSError, FlowerGPUError) as error:
            text = f"what clients take cannot be kept in {self.path} for the next run: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _in(self) -> Path:
        return state_folder.state_dir() / FOLDER if self._folder is None else self._folder

    def _written(self, known: Known) -> bytes:
        content = {"v": VERSION, "app": self._app, "clients": self._clients, **vars(known)}
        return json.dumps(content).encode(errors="surrogatepass")


def _merged(theirs: Known, ours: Known) -> Known:
    examples = {
        kind: _united(theirs.examples.get(kind, {}), ours.examples.get(kind, {}))
        for kind in {**theirs.examples, **ours.examples}
    }
    nothing: Mapping[str, Numbers] = {}
    seconds = {
        kind: {device: _united(one.get(device, {}), other.get(device, {})) for device in {**one, **other}}
        for kind in {**theirs.seconds, **ours.seconds}
        for one, other in [(theirs.seconds.get(kind, nothing), ours.seconds.get(kind, nothing))]
    }
    return Known(examples, seconds)


def _united(theirs: Numbers, ours: Numbers) -> Numbers:
    """Return both; what is ours counts, and stays where there are too many."""
    both = {**{client: number for client, number in theirs.items() if client not in ours}, **ours}
    kept = islice(both.items(), max(0, len(both) - _MOST_CLIENTS), None)
    return {client: float(f"{number:.4g}") for client, number in kept}


def _forget_oldest(folder: Path) -> None:
    found = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in found[:-_MOST_FILES]:
        path.unlink(missing_ok=True)


def _parsed(data: bytes) -> Known:
    """Read a file; ValueError if it is not one of ours."""
    try:
        content = json.loads(data)
        if content["v"] != VERSION:
            raise ValueError(f"version {content['v']!r} instead of {VERSION}")
        seconds = _by_name(content["seconds"], lambda found: _by_name(found, _numbers))
        return Known(_by_name(content["examples"], _numbers), seconds)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a file of durations, {type(error).__name__}: {error}") from None


def _by_name(found: Any, read: Callable[[Any], T]) -> dict[str, T]:
    return {name: read(value) for name, value in found.items()}


def _numbers(found: Any) -> dict[int, float]:
    numbers = {int(client): float(number) for client, number in found.items()}
    if not all(client >= 0 and 0 <= number <= _MOST for client, number in numbers.items()):
        raise ValueError("a number that cannot be")
    return numbers
