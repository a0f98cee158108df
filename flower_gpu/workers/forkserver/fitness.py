"""Checks that a fork server has imported the same code, with the same settings, as a caller would have.

:class:`EnvironmentUse` compares environment variables, :class:`Shadows` compares the files of modules, and
:class:`UserFiles` notices edits of the user's modules.
"""

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

# Variables that are set in each worker, or do not matter to a library.
_NOT_OF_A_LIBRARY = {
    identity.VISIBLE_DEVICES,
    # Flower reads it at import only for the file with the CLI's credentials. `launch` sets it for each run.
    "FLWR_HOME",
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
    """Record of the environment variables that libraries of this process read and set.

    A library that read ``HF_HOME`` when it was imported keeps that folder in all forks. So these forks do not
    fit a caller with another folder. Variables that a library has set must also be set in the forks.

    ``read``: values that libraries have read, by variable. None: the variable was not set.
    ``changed``: values that libraries have set, by variable. None: a library has removed the variable.
    """

    def __init__(self) -> None:
        self.read: dict[str, str | None] = {}
        self.changed: dict[str, str | None] = {}
        self._listed: deque[str] = deque()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record all reads and changes of variables within the block."""
        kind: Any = type(os.environ)
        get, iterate = kind.__getitem__, kind.__iter__

        def noting_get(environ: Any, name: Any) -> Any:
            value = None
            try:
                value = get(environ, name)
                return value
            finally:
                if environ is os.environ:
                    self._note(name, value, environ_before.get(name))

        def noting_iterate(environ: Any) -> Iterator[Any]:
            names = list(iterate(environ))
            if environ is os.environ:
                self._listed = deque(names)
            yield from names

        environ_before, modules = dict(os.environ), set(sys.modules)
        kind.__getitem__, kind.__iter__ = noting_get, noting_iterate
        try:
            yield
        finally:
            kind.__getitem__, kind.__iter__ = get, iterate
            if ANSWERS.has_asked:
                self.read.setdefault(identity.VISIBLE_DEVICES, environ_before.get(identity.VISIBLE_DEVICES))
            after = dict(os.environ)
            for name in environ_before.keys() | after.keys():
                if environ_before.get(name) != after.get(name):
                    self.changed[name] = after.get(name)
            for name in frameworks.read_at_import(sys.modules.keys() - modules):
                self.read.setdefault(name, environ_before.get(name))

    def note_read(self, names: Iterable[str]) -> None:
        """Record variables that C++ code has read. Python cannot see these reads."""
        for name in names:
            self.read.setdefault(name, os.environ.get(name))

    def differs_from(self, digests: Mapping[str, str]) -> list[str]:
        """Return the variables for which the libraries would read another value in another environment.

        ``digests``: digests of its variables (:func:`flower_gpu.workers.forkserver.identity.digests`).
        """
        read = identity.digests(self.read, self.read)
        # A caller that has imported the library itself has the value that the library has set.
        changed = identity.digests({**self.read, **self.changed}, self.read)
        return sorted(
            name for name in self.read if digests.get(name) not in (read.get(name), changed.get(name))
        )

    def set_too_late(self) -> dict[str, str | None]:
        """Return the present values of variables that have changed since a library read them, by name."""
        confinement_variables = confinement.own_variables()
        different = self.differs_from(identity.digests(os.environ, self.read))
        return {name: os.environ.get(name) for name in different if name not in confinement_variables}

    def apply_changes(self, keep: Mapping[str, str]) -> None:
        """Set the variables that libraries have set in ``os.environ``, except the names in ``keep``."""
        for name, value in self.changed.items():
            if name in keep:
                continue
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _note(self, name: str, value: str | None, inherited: str | None) -> None:
        # Copying the whole environment, for example to start a program, reads every variable in order. Such a
        # read does not mean that a library uses the variable.
        if self._listed and self._listed[0] == name:
            self._listed.popleft()
            return
        self._listed.clear()
        # A value that was set by a library is the same for every caller.
        if name in self.changed or value != inherited:
            return
        if name not in _NOT_OF_A_LIBRARY and not name.endswith("_NUM_THREADS"):
            self.read.setdefault(name, value)


class Shadows:
    """Finder of a caller's modules that a library of this process would hide, such as its ``datasets.py``.

    Create it after all libraries are imported.
    """

    def __init__(self) -> None:
        self._homes = _homes_of_modules()
        self._listings: dict[tuple[str, int], frozenset[str]] = {}

    def hidden(self, path: Sequence[str], working_folder: str) -> list[str]:
        """Return the top-level names of modules that a caller would import from another place.

        ``path``: the caller's ``sys.path``.
        ``working_folder``: the caller's working directory, for empty entries of ``path``.
        """
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
        except OSError:  # a missing folder, or a zip file
            return frozenset()
        return self._listings[key]


class UserFiles:
    """The files of the user's modules in this process. If a file is edited, forks have the old code."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def note(self, folders: Sequence[str]) -> None:
        """Remember the files of all imported modules that are outside of ``folders``."""
        prefixes = tuple(os.path.join(folder, "") for folder in folders)
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and not file.startswith(prefixes):
                self._seen.setdefault(file, _modified_ns(file))

    def edited(self) -> bool:
        """Return True if any of the files has changed since :meth:`note`."""
        return any(_modified_ns(file) != modified_ns for file, modified_ns in self._seen.items())


def _modified_ns(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return -1


def _homes_of_modules() -> dict[str, str]:
    """Return the folder in which each top-level module was found, by name, for modules from files."""
    homes = {}
    for name, module in list(sys.modules.items()):
        file = getattr(getattr(module, "__spec__", None), "origin", None)
        if "." not in name and isinstance(file, str) and os.path.isabs(file):
            path = Path(file)
            # The file name decides, not __path__: six is a single file, but has a __path__ like a package.
            if path.name.partition(".")[0] == "__init__":
                path = path.parent
            # Skip a module that has another name than its file. For example, setuptools provides its
            # _distutils as distutils, regardless of the caller's path.
            if path.name.partition(".")[0] == name:
                homes[name] = str(path.parent)
    return homes


def _importable_names(entry: str, among: Collection[str]) -> frozenset[str]:
    """Return the names in ``among`` of modules and packages in a folder."""
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
