"""Environment variables that code of the user's cannot change: those that hold a worker to its lease.

Scripts for one GPU often begin with ``os.environ["CUDA_VISIBLE_DEVICES"] = "0"``. In a worker that would be
another GPU than the one it was granted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from flower_gpu.frameworks.framework import Rule


@contextmanager
def fixed(rules: Mapping[str, Rule]) -> Iterator[None]:
    """Let assignments to variables of ``os.environ`` go through these rules, inside of the block.

    They cannot be deleted either: ``clear`` leaves them, and ends. It is not noticed when a library in C sets
    them.
    """
    outer: _VariableRules | None = os.environ.__dict__.get(_RULES)
    found = _VariableRules(rules if outer is None else {**outer.rules, **rules})
    kind: Any = type(os.environ)
    module: Any = os
    putenv, unsetenv = os.putenv, os.unsetenv

    def unset_unless_fixed(name: Any) -> None:
        if not found.has(name):
            unsetenv(name)

    # Not other mappings in their place: other modules have imported those that are there.
    mappings: list[Any] = [os.environ, *([os.environb] if os.supports_bytes_environ else [])]
    for mapping in mappings:
        mapping.__class__ = kind if outer is not None else _fixed_kind(kind)
        mapping.__dict__[_RULES] = found
    module.putenv = lambda name, value: putenv(name, found.ruled(name, value))
    module.unsetenv = unset_unless_fixed
    try:
        yield
    finally:
        module.putenv, module.unsetenv = putenv, unsetenv
        for mapping in mappings:
            mapping.__class__ = kind
            mapping.__dict__[_RULES] = outer


class _VariableRules:
    """What variables become when they are set, and what is said of that, once for each."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules = rules
        self._said: set[str] = set()

    def has(self, name: Any) -> bool:
        return isinstance(name, str | bytes) and os.fsdecode(name) in self.rules

    def ruled(self, name: Any, value: Any) -> Any:
        """Return what a variable is set to, as ``str`` or ``bytes`` like ``value``."""
        if not self.has(name) or not isinstance(value, str | bytes):
            return value
        name, asked = os.fsdecode(name), os.fsdecode(value)
        used = self.rules[name](asked)
        if asked not in used and name not in self._said:
            self._said.add(name)
            print(
                f"flower-gpu: {name}={asked} is not used: this worker keeps to its lease, which has "
                f"{os.environ.get(name, '')!r}",
                file=sys.stderr,
            )
        return used if isinstance(value, str) else os.fsencode(used)


_RULES: Final = "_flower_gpu_rules"


@cache  # to make a class takes longer than all else here, and a worker may have a thousand calls
def _fixed_kind(kind: Any) -> Any:
    """Return the class of a mapping of variables some of which are fixed."""

    class Fixed(kind):  # type: ignore[misc]
        def __setitem__(self, name: Any, value: Any) -> None:
            super().__setitem__(name, self.__dict__[_RULES].ruled(name, value))

        def __delitem__(self, name: Any) -> None:
            if name not in self or not self.__dict__[_RULES].has(name):
                super().__delitem__(name)

        def popitem(self) -> tuple[Any, Any]:
            # clear() calls it until there is nothing left.
            for name in self:
                if not self.__dict__[_RULES].has(name):
                    return name, self.pop(name)
            raise KeyError("what is left holds this worker to its lease")

    return Fixed
