"""Whether a fork server's imports equal those of a caller."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flower_gpu import frameworks
from flower_gpu.frameworks.cuda_answers import ANSWERS
from flower_gpu.workers import confinement
from flower_gpu.workers.forkserver import identity

# Set in each worker, or of no importance to a library.
_NOT_OF_A_LIBRARY = {
    identity.VISIBLE_DEVICES,
    "FLWR_HOME",  # at import, only for the file of the CLI's credentials; `launch` has a folder for each run
    "OLDPWD",
    "PWD",
    "PYTHONUNBUFFERED",
    *frameworks.UNTOUCHED_CUDA,
    "SHLVL",
    "TEMP",
    "TMP",
    "TMPDIR",
    "_",
}


class EnvironmentUse:
    """Notes which environment variables libraries of this process read, and which they set.

    A library that read ``HF_HOME`` when it was imported keeps that folder in all forks: they are no good for
    a caller with another folder. What a library has set must also be set in the forks.
    """

    def __init__(self) -> None:
        self.read: dict[str, str | None] = {}
        self.changed: dict[str, str | None] = {}
        self._listed: deque[str] = deque()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the use inside of the block."""
        kind: Any = type(os.environ)
        get, iterate = kind.__getitem__, kind.__iter__

        def noting_get(environ: Any, name: Any) -> Any:
            value = None
            try:
                value = get(environ, name)
                return value
            finally:
                if environ is os.environ:
                    self._note(name, value, before.get(name))

        def noting_iterate(environ: Any) -> Iterator[Any]:
            names = list(iterate(environ))
            if environ is os.environ:
                self._listed = deque(names)
            yield from names

        before, modules = dict(os.environ), set(sys.modules)
        kind.__getitem__, kind.__iter__ = noting_get, noting_iterate
        try:
            yield
        finally:
            kind.__getitem__, kind.__iter__ = get, iterate
            if ANSWERS.has_asked:
                self.read.setdefault(identity.VISIBLE_DEVICES, before.get(identity.VISIBLE_DEVICES))
            after = dict(os.environ)
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    self.changed[name] = after.get(name)
            for name in frameworks.read_at_import(sys.modules.keys() - modules):
                self.read.setdefault(name, before.get(name))

    def note_read(self, names: Iterable[str]) -> None:
        """Note variables that C++ code has read by now."""
        for name in names:
            self.read.setdefault(name, os.environ.get(name))

    def differs_from(self, digests: Mapping[str, str]) -> list[str]:
        """Return the variables that the libraries would have found otherwise in another environment.

        ``digests``: of its variables (:func:`flower_gpu.workers.forkserver.identity.digests`).
        """
        read = identity.digests(self.read, self.read)
        # A caller that has imported the library itself has what the library sets.
        changed = identity.digests({**self.read, **self.changed}, self.read)
        return sorted(
            name for name in self.read if digests.get(name) not in (read.get(name), changed.get(name))
        )

    def set_too_late(self) -> dict[str, str | None]:
        """Return the variables that have another value by now than the one libraries have read."""
        ours = confinement.own_variables()
        different = self.differs_from(identity.digests(os.environ, self.read))
        return {name: os.environ.get(name) for name in different if name not in ours}

    def apply_changes(self, keep: Mapping[str, str]) -> None:
        """Set the libraries' variables in ``os.environ``, except those in ``keep``."""
        for name, value in self.changed.items():
            if name in keep:
                continue
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _note(self, name: str, value: str | None, inherited: str | None) -> None:
        # A copy of the whole environment (for a program that is started) tells nothing about a variable.
        if self._listed and self._listed[0] == name:
            self._listed.popleft()
            return
        self._listed.clear()
        if name in self.changed or value != inherited:  # what libraries set is the same for every caller
            return
        if name not in _NOT_OF_A_LIBRARY and not name.endswith("_NUM_THREADS"):
            self.read.setdefault(name, value)


class Shadows:
    """Finds modules of a caller that a library of this process would hide: its own ``datasets.py``, say.

    Made when all libraries are imported.
    """

    def __init__(self) -> None:
        self._homes = _homes_of_modules()
        self._listings: dict[tuple[str, int], frozenset[str]] = {}

    def hidden(self, path: Sequence[str], working_folder: str) -> list[str]:
        """Return top-level names that a caller would find elsewhere than this process did."""
        entries = [entry or working_folder for entry in path]
        order = {entry: place for place, entry in reversed(list(enumerate(entries)))}
        return sorted(
            {
                name
                for entry, place in order.items()
                for name in self._names_in(entry)
                if place < order.get(self._homes[name], len(entries))
            }
        )

    def _names_in(self, entry: str) -> frozenset[str]:
        try:
            key = entry, os.stat(entry).st_mtime_ns
            if key not in self._listings:
                self._listings[key] = _importable_names(entry, self._homes.keys())
        except OSError:  # nothing, or a zip file
            return frozenset()
        return self._listings[key]


class UserFiles:
    """The files of a user's own modules in this process: forks would have the old code of an edited one."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def note(self, folders: Sequence[str]) -> None:
        """Remember the files outside of ``folders`` of all modules that are imported now."""
        prefixes = tuple(os.path.join(folder, "") for folder in folders)
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and not file.startswith(prefixes):
                self._seen.setdefault(file, _modified_ns(file))

    def edited(self) -> bool:
        """Tell whether one of them has changed since."""
        return any(_modified_ns(file) != modified_ns for file, modified_ns in self._seen.items())


def _modified_ns(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return -1


def _homes_of_modules() -> dict[str, str]:
    """Return for each top-level module that came from a file the folder in which it was found."""
    homes = {}
    for name, module in list(sys.modules.items()):
        file = getattr(getattr(module, "__spec__", None), "origin", None)
        if "." not in name and isinstance(file, str) and os.path.isabs(file):
            path = Path(file)
            # By the file: six is a single one, but has a __path__ as packages do.
            if path.name.partition(".")[0] == "__init__":
                path = path.parent
            # setuptools gives its _distutils to everybody as distutils, whatever a caller's path has.
            if path.name.partition(".")[0] == name:
                homes[name] = str(path.parent)
    return homes


def _importable_names(entry: str, among: Collection[str]) -> frozenset[str]:
    names = set()
    with os.scandir(entry) as items:
        for item in items:
            name, dot, ending = item.name.partition(".")
            if name not in among:
                continue
            is_module = ending == "py" or ending.endswith("so")
            if is_module or (not dot and Path(item.path, "__init__.py").exists()):
                names.add(name)
    return frozenset(names)
