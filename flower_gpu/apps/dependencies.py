"""Packages that an app declares in its ``pyproject.toml`` and that this environment lacks.

Python names the module that is missing, which may be called differently: the module ``sklearn`` is in the
package ``scikit-learn``. Only the app's declaration says what to install.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from flower_gpu.apps.app import FlowerApp
from flower_gpu.apps.app_imports import libraries_of
from flower_gpu.errors import ConfigError


def missing_packages_text(app: FlowerApp) -> str:
    """Return a sentence that names the declared packages that are missing; empty if all are installed."""
    missing = [text for text in app.dependencies if _is_missing(text)]
    if not missing:
        return ""
    are = "which is" if len(missing) == 1 else "which are"
    return f"{app.name} declares {', '.join(missing)}, {are} not installed: pip install {shlex.join(missing)}"


def missing_packages_note(app: FlowerApp) -> str:
    """Return the same sentence if the app imports a module that is missing; otherwise an empty text.

    The imports are read from the source, so no code of the app runs.
    """
    references = (app.serverapp, app.clientapp)
    modules = [name for each in references for name in libraries_of(app.path, each.partition(":")[0])]
    if all(_is_importable(name) for name in {name.partition(".")[0] for name in modules}):
        return ""
    return missing_packages_text(app)


@contextmanager
def missing_packages_named(folder: Path | None) -> Iterator[None]:
    """Add the declared packages that are not installed to a ModuleNotFoundError that leaves the block.

    ``folder``: the app's; None for an app without one.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        text = ""
        if folder is not None:
            try:
                text = missing_packages_text(FlowerApp.load(folder))
            except ConfigError:  # the folder has changed since; the error itself is what matters
                text = ""
        if text and text not in str(error):
            error.msg = f"{error.msg}. {text}"
            error.args = (error.msg,)
        raise


def _is_missing(text: str) -> bool:
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return False
    if requirement.marker is not None and not requirement.marker.evaluate():
        return False
    try:
        distribution(requirement.name)
    except PackageNotFoundError:
        # Another package may have its modules, as flwr-nightly has those of flwr.
        return not _is_importable(requirement.name.replace("-", "_"))
    return False


def _is_importable(top: str) -> bool:
    try:
        return find_spec(top) is not None
    except (ImportError, ValueError):  # ValueError: it is loaded, without a specification
        return True
