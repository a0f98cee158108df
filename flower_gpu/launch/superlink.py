"""Engine ``superlink``: one SuperLink, N SuperNodes, and ``flwr run``."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from flower_gpu import trace
from flower_gpu.apps.app import ConfigValue, format_pairs
from flower_gpu.apps.app_imports import libraries_of
from flower_gpu.errors import ConfigError
from flower_gpu.flower.commands import SERVER_COMMANDS, CommandFolder, fast_start, warm_up_command
from flower_gpu.flower.waits.wakeup import with_group
from flower_gpu.launch import ports
from flower_gpu.launch.engine import PORT_ATTEMPTS, LaunchEngine, died
from flower_gpu.launch.supervisor import LaunchFailedError, Service, new_lines
from flower_gpu.printable import told_if_slow

#: Name of the connection in the run's own Flower configuration.
CONNECTION: Final = "launch"
# flwr.serverapp.strategy: said once a second while fewer nodes are there than the strategy wants.
_WAITING: Final = re.compile(r"Waiting for nodes to connect: \d+ connected \(minimum required: (\d+)\)")
# flwr.supernode: said once, when the SuperLink has given it its id.
_NODE_ID: Final = re.compile(r"SuperNode ID: (\d+)")
# What flwr's FAB builder may take; anything else in the app's folder stays where it is.
_FAB_FILES: Final = (
    "*.py",
    "*.toml",
    "*.md",
    "*.yaml",
    "*.yml",
    "*.json",
    "*.jsonl",
    "LICENSE",
    ".gitignore",
)


def superlink_command(port: int) -> list[str]:
    """Build the command line of the SuperLink."""
    return [
        "flower-superlink",
        "--insecure",  # it is reachable from this machine only
        "--host",
        ports.HOST,
        "--port",
        str(port),
        "--disable-runtime-dependency-installation",
    ]


def supernode_command(superlink_port: int, port: int, node_config: Mapping[str, ConfigValue]) -> list[str]:
    """Build the command line of one SuperNode."""
    return [
        "flower-supernode",
        "--insecure",
        "--superlink",
        f"{ports.HOST}:{superlink_port}",
        "--host",
        ports.HOST,
        "--port",
        str(port),
        "--node-config",
        format_pairs(node_config),
    ]


class SuperLinkEngine(LaunchEngine):
    """Runs an app the way Flower means it, with all parts on this machine."""

    parts = "SuperNodes and the ServerApp"
    _port = 0

    @property
    def server_log(self) -> Path:
        """Log of ``flwr run``, which streams that of the ServerApp."""
        return self.folder.log("run")

    def start(self) -> None:
        """Start the SuperLink, then, as soon as it answers, the SuperNodes and the run."""
        self._clients_of_nodes: dict[int, str] = {}
        self.folder.flwr_home.mkdir()
        self.env = with_group(self.env, self.plan.clients)
        self._node_env = self.env
        self._link_env = self.link_environment()
        if self.plan.fast_start:
            with _told("Messages start as slowly as Flower's own"):
                nodes, are_told = self.plan.clients, self._link_env is not self.env
                self._node_env = fast_start(self.env, with_lease=False, nodes=nodes, are_told=are_told)
                env = self.client_environment(0)
                app = self.plan.app
                # Else each client of the first round would import them: six clients on two cores for 20 s.
                command = warm_up_command(libraries_of(app.path, app.clientapp.partition(":")[0]))
                self.supervisor.start(Service("warm-up", command, env, self.folder.log("warm-up")))
        if self.plan.fast_start:
            self.supervisor.fork_programs(self.env, self.folder.log("programs"))
        # First alone: a SuperNode that comes too early waits longer and longer between its tries.
        with told_if_slow(self.say, "starting the SuperLink"):
            self._port = self.start_on_free_port(self._superlink, ports.is_healthy)
        self._write_connection()
        node_ports = ports.free_ports(self.plan.clients)
        self._nodes = [self._node(client, port) for client, port in enumerate(node_ports)]
        self._node_attempts = [1] * self.plan.clients
        command = ["flwr", "run", str(self._app_folder()), CONNECTION, "--stream"]
        if self.plan.overrides:
            command += ["--run-config", format_pairs(self.plan.overrides)]
        self._run = Service("flwr run", command, self.env, self.server_log)
        self._list: Service | None = None
        self._log = trace.Follower(self.server_log)
        # The run first: Flower builds and submits it while the SuperNodes start; its strategy waits for them.
        self.supervisor.start(self._run, *self._nodes)

    def _write_connection(self) -> None:
        (self.folder.flwr_home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "{ports.HOST}:{self._port}"\ninsecure = true\n',
            encoding="utf-8",
        )

    def client_of(self, node_id: int) -> str:
        """Return the number of a node's client, from what its SuperNode says at its start."""
        if node_id not in self._clients_of_nodes:
            for client in range(self.plan.clients):
                with suppress(OSError):
                    text = self.folder.log(f"client-{client}").read_text(errors="replace")
                    for found in _NODE_ID.finditer(text):
                        self._clients_of_nodes[int(found[1])] = str(client)
        return self._clients_of_nodes.get(node_id) or super().client_of(node_id)

    def has_finished(self) -> bool:
        """Notice what ended; when the run did, ask Flower how."""
        if self._list is not None:
            return self._flower_says_completed(self._list)
        if not self._link.runs:
            raise died(self._link)
        for client, node in enumerate(self._nodes):
            if not node.runs:
                self._restart_or_fail(client, node)
        if self._run.runs:
            self._fail_if_nodes_never_suffice()
            return False
        if self._run.returncode != 0:
            raise LaunchFailedError(self._run.describe_end(), self._run)
        for node in self._nodes:  # they take a while to end; asking Flower does, too
            node.send(signal.SIGTERM)
        self._ask()
        return False

    def link_environment(self) -> Mapping[str, str]:
        """Return the environment of a SuperLink that finds our ``flwr-serverapp``; says why not."""
        with _told("Rounds are not shown while they run"):
            return {
                **self.env,
                "PATH": CommandFolder(SERVER_COMMANDS).first_on(self.env.get("PATH")),
            }
        return self.env

    def _superlink(self, port: int) -> Service:
        log = self.folder.log("superlink")
        self._link = Service("SuperLink", superlink_command(port), self._link_env, log)
        return self._link

    def _node(self, client: int, port: int) -> Service:
        return Service(
            f"SuperNode of client {client}",
            supernode_command(self._port, port, self.plan.node_config_of(client)),
            self.client_environment(client, self._node_env),
            self.folder.log(f"client-{client}"),
        )

    def _restart_or_fail(self, client: int, node: Service) -> None:
        if self._node_attempts[client] == PORT_ATTEMPTS or not node.port_was_taken:
            raise died(node)
        self._node_attempts[client] += 1
        self._nodes[client] = self._node(client, ports.free_ports(1)[0])
        self.supervisor.start(self._nodes[client])

    def _app_folder(self) -> Path:
        """Folder that ``flwr run`` bundles: it would take in the logs of all runs if they lie in it."""
        app = self.plan.app.path
        if not self.folder.path.is_relative_to(app):
            return app
        logs = self.folder.path.parent
        for pattern in _FAB_FILES:
            for source in app.rglob(pattern):
                if not source.is_relative_to(logs) and source.is_file():
                    target = self.folder.app / source.relative_to(app)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)
        return self.folder.app

    def _fail_if_nodes_never_suffice(self) -> None:
        for line in new_lines(self._log):
            match = _WAITING.search(line)
            if match and (needed := int(match[1])) > self.plan.clients:
                raise LaunchFailedError(
                    f"the strategy of {self.plan.app.name} waits for {needed} clients, but there are "
                    f"{self.plan.clients}: give --clients {needed}, or lower min_available_nodes in the app"
                )

    def _ask(self) -> None:
        self._list = Service(
            "flwr list",
            ["flwr", "list", CONNECTION, "--format", "json"],
            self.env,
            self.folder.log("flwr-list"),
            output=self.folder.flower_status,
        )
        self.supervisor.start(self._list)

    def _flower_says_completed(self, asked: Service) -> bool:
        if asked.runs:
            return False
        if asked.returncode != 0:
            raise LaunchFailedError(f"{asked.describe_end()}: no word on how the run ended", asked)
        status, details = run_status(self.folder.flower_status.read_text(encoding="utf-8"))
        if status == "finished:completed":
            return True
        if status.startswith("finished"):
            text = "" if details in ("", "N/A") else f": {details.splitlines()[0]}"
            raise LaunchFailedError(f"Flower reports the run as {status}{text}", self._run)
        # The log stream broke off, the run did not.
        self._ask()
        return False


@contextmanager
def _told(otherwise: str) -> Iterator[None]:
    """Go on where our commands cannot be used, and say why not and what is missing."""
    try:
        yield
    except ConfigError as error:
        print(f"{otherwise}: {error}", file=sys.stderr)


def run_status(text: str) -> tuple[str, str]:
    """Read the status of the only run, and its details, from what ``flwr list --format json`` prints.

    Raises LaunchFailedError if it is something else.
    """
    try:
        answer: Any = json.loads(text[text.index("{") :])
        run = answer["runs"][0]
        return str(run["status"]), str(run.get("status-details") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise LaunchFailedError(f"flwr list gave no status of the run: {text.strip()[:200]}") from None
