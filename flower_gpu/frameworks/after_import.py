"""A function that is called right after a library was imported, before its user can do anything with it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Self


class AfterImport:
    """Finder that finds nothing itself, and calls a function right after one module was imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    @classmethod
    def begin(cls, name: str, then: Callable[[], None]) -> Self:
        """Have ``then`` called when the module ``name`` is imported."""
        finder = cls(name, then)
        sys.meta_path.insert(0, finder)
        return finder

    def end(self) -> None:
        """Do not call it any more, if the module was not imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module as others do, and watch its loader."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader's own again
            execute(module)
            self._then()

        with suppress(AttributeError):  # a loader that takes no attributes: the environment has the cap
            loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
