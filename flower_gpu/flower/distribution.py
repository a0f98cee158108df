"""The installed distribution of Flower: ``flwr``, or ``flwr-nightly``, which has the same package in it.

Where both are installed, each has overwritten files of the other, and the imported package is a mixture.
"""

from __future__ import annotations

from importlib import metadata
from typing import Final

#: Distributions that have the package ``flwr``, in the order in which Flower looks for its own version.
NAMES: Final = ("flwr", "flwr-nightly")


def installed() -> dict[str, metadata.Distribution]:
    """Return the installed distributions of Flower by their names: none, one, or both."""
    distributions = {}
    for name in NAMES:
        try:
            distributions[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    return distributions


def version() -> str | None:
    """Return the version of the installed Flower, or None."""
    return next((distribution.version for distribution in installed().values()), None)


def described() -> str:
    """Return name and version of the installed Flower for a message, such as ``flwr 1.42.0``."""
    return next((f"{name} {distribution.version}" for name, distribution in installed().items()), "flwr")
