"""The installed distribution of Flower: ``flwr``, or ``flwr-nightly``, which contains the same package.

If both are installed, each has overwritten files of the other, and the imported package is a mixture.
"""

from __future__ import annotations

from importlib import metadata
from typing import Final

#: Distributions that contain the package ``flwr``, in the order in which Flower looks for its own version.
NAMES: Final = ("flwr", "flwr-nightly")


def installed() -> dict[str, metadata.Distribution]:
    """Return the installed distributions of Flower by name, up to two."""
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
    """Return the name and version of the installed Flower, such as ``flwr 1.42.0``, for a message."""
    return next((f"{name} {distribution.version}" for name, distribution in installed().items()), "flwr")
