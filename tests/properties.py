"""How many examples the properties of the tests are checked with; ``conftest.py`` has the profiles."""

from __future__ import annotations

from hypothesis import settings

#: Examples of a property that sets no number of its own.
USUAL = 100
#: Factor for the number of examples in the profile that explores.
EXPLORED = 20


def examples(number: int) -> int:
    """Return the number of examples of a property that usually has ``number`` of them.

    The profile that explores multiplies it, because a number in ``@settings`` hides that of the profile.
    """
    return number * settings.default.max_examples // USUAL
