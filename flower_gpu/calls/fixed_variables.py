"""Environment variables that code of the user's cannot change: those that hold a worker to its lease.

Scripts for one GPU often begin with ``os.environ["CUDA_VISIBLE_DEVICES"] = "0"``. In a worker that would be
another GPU than the one it was granted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flower_gpu.frameworks.framework import Rule


@contextmanager
def fixed(rules: Mapping[str, Rule]) -> Iterator[None]:
    """Let assignments to variables of ``os.environ`` go through these rules, inside of the block.

    They cannot be deleted either: ``clear`` leaves them, and ends. It is not noticed when a library in C sets
    them.
    """
    said: set[str] = set()

    def say(name: str, value: object) -> None:
        if name not in said:
            said.add(name)
            print(
                f"flower-gpu: {name}={value} is not used: this worker keeps to its lease, which has "
                f"{os.environ.get(name, '')!r}",
                file=sys.stderr,
            )

    def is_fixed(name: Any) -> bool:
        return isinstance(name, str | bytes) and os.fsdecode(name) in rules

    def ruled(name: Any, value: Any) -> Any:
        """Return what a variable is set to, as ``str`` or ``bytes`` like ``value``."""
        if not is_fixed(name) or not isinstance(value, str | bytes):
            return value
        name, asked = os.fsdecode(name), os.fsdecode(value)
        used = rules[name](asked)
        if asked not in used:
            say(name, asked)
        return used if isinstance(value, str) else os.fsencode(used)

    kind: Any = type(os.environ)
    module: Any = os
    putenv, unsetenv = os.putenv, os.unsetenv

    class Fixed(kind):  # type: ignore[misc]
        def __setitem__(self, name: Any, value: Any) -> None:
            super().__setitem__(name, ruled(name, value))

        def __delitem__(self, name: Any) -> None:
            if name not in self or not is_fixed(name):
                super().__delitem__(name)

        def popitem(self) -> tuple[Any, Any]:
            # clear() calls it until there is nothing left.
            for name in self:
                if not is_fixed(name):
                    return name, self.pop(name)
            raise KeyError("what is left holds this worker to its lease")

    def unset_unless_fixed(name: Any) -> None:
        if not is_fixed(name):
            unsetenv(name)

    # Not other mappings in their place: other modules have imported those that are there.
    mappings: list[Any] = [os.environ, *([os.environb] if os.supports_bytes_environ else [])]
    for mapping in mappings:
        mapping.__class__ = Fixed
    module.putenv = lambda name, value: putenv(name, ruled(name, value))
    module.unsetenv = unset_unless_fixed
    try:
        yield
    finally:
        module.putenv, module.unsetenv = putenv, unsetenv
        for mapping in mappings:
            mapping.__class__ = kind
