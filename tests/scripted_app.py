"""The Flower app of the tests, whose run config says what its clients and its server do, and new small apps.

The app itself is in ``tests/app``. Some clients are modules of their own, because an app shows by the imports
and mods of its client what it needs. A variant of the app has such a client and other defaults.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared_servers import SHARED_STATE

APP = Path(__file__).parent / "app"
_PYPROJECT = """
[project]
name = "{name}"
version = "1"

[tool.flwr.app]
publisher = "nobody"

[tool.flwr.app.components]
serverapp = "{package}.app:server"
clientapp = "{package}.app:client"

[tool.flwr.app.config]
{config}
"""
_IMPORTS = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_gpu import FedAvg

server = ServerApp()
client = ClientApp()
"""
_SIMPLE = {"exact-order": False, "server-evaluates": False}
#: Defaults of the run config that differ in a variant. A variant's client is the module of the same name.
VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {**_SIMPLE, "weights": "network"},
    "exact": {
        **_SIMPLE,
        "weights": "normal",
        "num-server-rounds": 3,
        "fraction-train": 0.8,
        "fraction-evaluate": 0.0,
    },
    "leased": {**_SIMPLE, "elements": 10, "num-server-rounds": 1},
    "sized": {**_SIMPLE, "elements": 10},
}


def copy_of_app(folder: Path, client: str = "client_app", **config: Any) -> Path:
    """Copy the app to a new folder, which a test may change, and return the folder.

    ``client``: module of the client. ``config``: other defaults of the run config.
    """
    shutil.copytree(APP, folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "pyproject.toml"
    text = file.read_text().replace("scripted.client_app:", f"scripted.{client}:")
    for key, value in config.items():
        text, count = re.subn(f"(?m)^{key} = .*$", f"{key} = {json.dumps(value)}", text)
        assert count == 1, key
    file.write_text(text)
    return folder


def variant(name: str) -> Path:
    """Return the folder of a variant, or of the app itself for "plain". No test may change it.

    All processes of pytest-xdist share the folder.
    """
    if name == "plain":
        return APP
    folder = Path(SHARED_STATE["FLOWER_GPU_STATE_DIR"], "apps", name)
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            copy = copy_of_app(Path(temporary, name), name, **VARIANTS[name])
            # Another process may have created the same folder meanwhile.
            with suppress(OSError):
                copy.rename(folder)
    return folder


def write_app(
    folder: Path, code: str, name: str = "my-app", config: str = "num-server-rounds = 1\nlearning-rate = 0.5"
) -> Path:
    """Write an app whose module ``app`` has this code after its imports. Return the folder of its package."""
    package = folder / name.replace("-", "_")
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "app.py").write_text(f"{_IMPORTS}{code}")
    pyproject = _PYPROJECT.format(name=name, package=package.name, config=config)
    (folder / "pyproject.toml").write_text(pyproject)
    return package
