"""Environment variables that code of the user's cannot change: those that hold a worker to its lease.

Scripts for one GPU often begin with ``os.environ["CUDA_VISIBLE_DEVICES"] = "0"``. In a worker that would be
another GPU than the one it was granted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

#: Makes of what somebody sets a variable to what it is set to.
Rule = Callable[[str], str]


@contextmanager
def fixed(rules: Mapping[str, Rule]) -> Iterator[None]:
    """Let assignments to variables of ``os.environ`` go through these rules, inside of the block.

    They cannot be deleted either. What sets them past ``os.environ`` (``os.putenv``, a library in C) is not
    noticed.

    Parameters
    ----------
    rules : mapping
        By name of the variable. One that returns what is there already leaves it as it is.
    """
    kind: Any = type(os.environ)
    said: set[str] = set()

    def say(name: str, value: object) -> None:
        if name not in said:
            said.add(name)
            print(
                f"flower-gpu: {name}={value} is not used: this worker keeps to its lease, which has "
                f"{os.environ.get(name, '')!r}",
                file=sys.stderr,
            )

    class Fixed(kind):  # type: ignore[misc]
        def __setitem__(self, name: str, value: str) -> None:
            if name in rules:
                asked, value = value, rules[name](value)
                if asked not in value:
                    say(name, asked)
            super().__setitem__(name, value)

        def __delitem__(self, name: str) -> None:
            if name not in rules:
                super().__delitem__(name)

    # Not another mapping in its place: other modules have imported the one that is there.
    os.environ.__class__ = Fixed
    try:
        yield
    finally:
        os.environ.__class__ = kind
