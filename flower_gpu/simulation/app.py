"""The app that a simulation runs: its two components, from a folder or as objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.server_app import LoadServerAppError
from flwr.supercore.object_ref import load_app

from flower_gpu.apps.app import FlowerApp
from flower_gpu.errors import ConfigError
from flower_gpu.simulation.messages import AppReference

_UNNAMED = "app"  # two components without a folder


def name_and_folder(app: str | Path | tuple[ServerApp, ClientApp]) -> tuple[str, Path | None]:
    """Return what an app is called, and where it is if it has a folder.

    Raises
    ------
    ConfigError
        If the folder holds no app.
    """
    if isinstance(app, tuple):
        return _UNNAMED, None
    found = FlowerApp.load(Path(app))
    return found.name, found.path


@dataclass(frozen=True)
class SimulatedApp:
    """What is to run."""

    name: str  # its name
    server: ServerApp | str  # the one component, or ``"package.module:attribute"``
    client: ClientApp | AppReference  # the other one
    folder: Path | None  # where it is, if it has a folder
    run_config: Mapping[str, Any]  # all of its run config

    @classmethod
    def of(
        cls, app: str | Path | tuple[ServerApp, ClientApp], run_config: Mapping[str, Any], num_supernodes: int
    ) -> SimulatedApp:
        """Take what a user hands over, and check it.

        Raises
        ------
        ConfigError
            If a folder holds no app, or the app knows no such run config.
        TypeError
            If it is something else.
        """
        if isinstance(app, tuple):
            server, client = app
            if not isinstance(server, ServerApp) or not isinstance(client, ClientApp):
                raise TypeError("an app is a folder, or a ServerApp and a ClientApp")
            return cls(_UNNAMED, server, client, None, dict(run_config))
        found = FlowerApp.load(Path(app))
        values = found.simulated(run_config, num_supernodes)
        return cls(found.name, found.serverapp, AppReference(found.path, found.clientapp), found.path, values)

    def load_server(self) -> ServerApp:
        """Return the ServerApp; imports it where only its name is known.

        Raises
        ------
        LoadServerAppError
            If that fails.
        ConfigError
            If it is something else.
        """
        if isinstance(self.server, ServerApp):
            return self.server
        loaded = load_app(self.server, LoadServerAppError, self.folder)
        if not isinstance(loaded, ServerApp):
            raise ConfigError(f"{self.server} is a {type(loaded).__name__}, not a ServerApp")
        return loaded
