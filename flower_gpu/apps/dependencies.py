"""Messages about packages that an app declares in its ``pyproject.toml`` but that are not installed.

The problem: when an import fails, Python's error names the missing module, such as ``sklearn``. The user has
to install a package, which may have another name, such as ``scikit-learn``. The app declares its packages, so
the messages name the declared packages that are missing, and the command that installs them.
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
    """Return a sentence about the missing packages and how to install them, or "" if all are installed."""
    missing = [text for text in app.dependencies if _is_missing(text)]
    if not missing:
        return ""
    which_are = "which is" if len(missing) == 1 else "which are"
    packages, command = ", ".join(missing), f"pip install {shlex.join(missing)}"
    return f"{app.name} declares {packages}, {which_are} not installed: {command}"


def missing_packages_note(app: FlowerApp) -> str:
    """Return :func:`missing_packages_text` if the app imports a missing module, otherwise "".

    A missing package that the app declares but never imports does no harm, so it is not mentioned. The
    imports are read from the source, without running code of the app.
    """
    references = (app.serverapp, app.clientapp)
    modules = [name for ref in references for name in libraries_of(app.path, ref.partition(":")[0])]
    if all(_is_importable(name) for name in {name.partition(".")[0] for name in modules}):
        return ""
    return missing_packages_text(app)


@contextmanager
def missing_packages_named(folder: Path | None) -> Iterator[None]:
    """Add the missing packages of an app to the text of a ModuleNotFoundError that the block raises.

    ``folder``: folder of the app, or None for an app without a folder.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        text = ""
        if folder is not None:
            try:
                text = missing_packages_text(FlowerApp.load(folder))
            except ConfigError:
                # The folder was valid at the start of the run but has changed. Raise the original error as it
                # is.
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
        # Another installed package may provide the same modules. For example, flwr-nightly provides those of
        # flwr.
        return not _is_importable(requirement.name.replace("-", "_"))
    return False


def _is_importable(top: str) -> bool:
    try:
        return find_spec(top) is not None
    except (ImportError, ValueError):
        # ValueError means that the module is loaded but has no __spec__.
        return True
