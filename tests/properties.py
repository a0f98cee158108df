"""Number of examples for each property test. ``conftest.py`` has the profiles."""

from __future__ import annotations

from hypothesis import settings

#: Number of examples of a property that does not set its own.
USUAL = 100
#: Factor for the number of examples in the profile "explore".
EXPLORED = 20


def examples(number: int) -> int:
    """Return the number of examples for a property that usually has ``number`` examples.

    A number in ``@settings`` hides the number of the profile, so the profile's factor is applied here.
    """
    return number * settings.default.max_examples // USUAL
