"""The processes of one launch: a SuperLink, N SuperNodes and ``flwr run``, each with its environment.

Order of the start: the SuperLink starts first, because a SuperNode that cannot connect waits longer before
each try. Then ``flwr run`` and all SuperNodes start together. The strategy of the ServerApp waits for the
nodes.

Everything runs in one thread, which calls :meth:`Federation.has_finished` regularly. When ``flwr run`` has
exited, ``flwr list`` tells the outcome, because the log stream of ``flwr run`` may break off during a run.

Races: a free port may be taken by another process before the server listens on it. Then the server exits with
a message, and is started again with another port, up to ``PORT_ATTEMPTS`` times.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from flower_gpu import frameworks, options, trace
from flower_gpu.apps.app import ConfigValue, format_pairs
from flower_gpu.apps.app_imports import libraries_of
from flower_gpu.apps.folder import RunFolder, short
from flower_gpu.errors import ConfigError
from flower_gpu.launch import ports
from flower_gpu.launch.plan import NOT_INSTALLED, Plan
from flower_gpu.launch.supervisor import (
    LaunchFailedError,
    Service,
    Supervisor,
    last_traceback,
    new_lines,
    tail,
)
from flower_gpu.options import (
    CALL,
    CLIENT_VARIABLE,
    CONCURRENCY,
    ENVIRONMENTS_DIR,
    RUN_DIR_VARIABLE,
    CallOptions,
)
from flower_gpu.printable import first_line, printable, told_if_slow
from flower_gpu.programs.commands import (
    SERVER_COMMANDS,
    CommandFolder,
    fast_start,
    warm_up_command,
    with_flowers,
)
from flower_gpu.programs.environments import OPTION, environments_folder
from flower_gpu.programs.node_logs import clients_of_nodes, has_connected
from flower_gpu.programs.waits import with_group
from flower_gpu.workers.threads import planned_threads

#: Name of the connection in the run's own Flower configuration.
CONNECTION: Final = "launch"
#: Maximum number of starts of a process if another process takes its port. Each start gets a new port.
PORT_ATTEMPTS: Final = 4
# Output of flwr run when the SuperLink has accepted the app
_SUBMITTED: Final = "Successfully started run"
# flwr.serverapp.strategy logs this once a second while fewer nodes are connected than the strategy needs.
_WAITING: Final = re.compile(r"Waiting for nodes to connect: \d+ connected \(minimum required: (\d+)\)")
# Files that flwr's FAB builder may include. Other files in the app's folder are not copied.
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


def service_environment(
    base: Mapping[str, str], folder: RunFolder, calls: CallOptions | None = None
) -> dict[str, str]:
    """Return the environment of all processes of a run: the user's, a run's own variables, and options."""
    env = {
        # The user's environment, base, overrides these defaults.
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # Flower's default of 1 s delays each message.
        **frameworks.UNTOUCHED_CUDA,  # An app that asks for GPUs at import does not initialise CUDA.
        "PYTHONUNBUFFERED": "1",  # The output of an app is in its log even if its process is killed.
        "PYTHONIOENCODING": "utf-8",  # In some locales, flwr run would fail at text that is not ASCII.
        NOT_INSTALLED: "1",  # The app's dependencies are installed already.
        str(ENVIRONMENTS_DIR.variable): str(environments_folder(base)),
        **base,
        # These variables separate runs from each other and from the user's Flower configuration.
        "FLWR_HOME": str(folder.flwr_home),
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        RUN_DIR_VARIABLE: str(folder.path),
        "PATH": with_flowers(base.get("PATH")),
    }
    env.pop(CLIENT_VARIABLE, None)  # It is set for clients only.
    # All connections are local, so a proxy must not be used.
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, [base.get(name), ports.HOST, "localhost"]))
    return options.environment(calls or {}, env)


def client_environment(
    env: Mapping[str, str],
    client: int,
    concurrency: int,
    node_config: Mapping[str, ConfigValue] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the environment of one client's processes.

    ``env``: environment of all processes of the run.
    ``concurrency``: number of clients that may train at the same time.
    ``node_config``: config of the client's node.
    """
    result = {**options.node_environment(env, node_config), CLIENT_VARIABLE: str(client)}
    if not env.get(CONCURRENCY.variable):
        result[CONCURRENCY.variable] = str(concurrency)
    if not env.get("OMP_NUM_THREADS"):
        # A worker computes its share of the cores itself. This is for apps that train in the client's own
        # process. OpenMP threads wait for each other in busy loops: three clients with two threads each on
        # two cores took six times as long as with one thread each.
        num_cpus = node_config.get("num-cpus")
        variables = {} if num_cpus is None else {CALL["num_cpus"].variable: str(num_cpus)}
        result["OMP_NUM_THREADS"] = str(planned_threads({**result, **variables}))
    return result


class Federation:
    """The processes of one run. Starts them, and determines the outcome of the run.

    ``env``: environment of all processes, see :func:`service_environment`.
    ``say``: shows a line.
    """

    def __init__(
        self,
        plan: Plan,
        folder: RunFolder,
        env: Mapping[str, str],
        supervisor: Supervisor,
        say: Callable[[str], object] = print,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self._env = with_group(env, plan.clients)
        self._link_env: Mapping[str, str] = self._env
        self._node_env: Mapping[str, str] = self._env
        self._supervisor = supervisor
        self._say = say
        self._port = 0  # port of the SuperLink
        self._nodes: list[Service] = []
        self._node_attempts = [1] * plan.clients
        self._clients_of_nodes: dict[int, int] = {}
        self._status_query: Service | None = None  # `flwr list`, after the run has ended
        #: Log of ``flwr run``, which streams the log of the ServerApp.
        self.server_log = folder.log("run")
        self._server_lines = trace.Follower(self.server_log)
        self._server_lines.read_lines()  # Skips the lines of the run that this run resumes.

    def start(self) -> None:
        """Start the SuperLink, wait until it answers, and start the SuperNodes and the run.

        Raises LaunchFailedError if a process fails, or LaunchStoppedError.
        """
        self.folder.flwr_home.mkdir(exist_ok=True)
        self.use_our_commands()
        if self.plan.fast_start:
            self._warm_up()
        # The SuperLink starts alone, because a SuperNode that cannot connect waits longer before each try.
        with told_if_slow(self._say, "starting the SuperLink", self.missing):
            self._start_link()
        (self.folder.flwr_home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "{ports.HOST}:{self._port}"\ninsecure = true\n',
            encoding="utf-8",
        )
        node_ports = ports.free_ports(self.plan.clients)
        self._nodes = [self._node(client, port) for client, port in enumerate(node_ports)]
        command = ["flwr", "run", str(self.app_folder()), CONNECTION, "--stream"]
        if self.plan.overrides:
            command += ["--run-config", format_pairs(self.plan.overrides)]
        self._run = Service("flwr run", command, self._env, self.server_log)
        # The run comes first, so that Flower builds and submits it while the SuperNodes start. Its strategy
        # waits for them.
        self._supervisor.start(self._run, *self._nodes)

    def missing(self, then: str = "the ServerApp to send its first message") -> str:
        """Return a line with the reason why a start takes long, and the end of the log with details.

        ``then``: the reason after the run is submitted and all SuperNodes are connected.
        """
        away = [client for client, node in enumerate(self._nodes) if not has_connected(node.log)]
        if not self._nodes:
            what, log = f"the SuperLink to answer on port {self._port}", self.folder.log("superlink")
        elif _SUBMITTED not in tail(self.server_log, 1000):
            what, log = "flwr run to submit the app", self.server_log
        elif away:
            clients = f"client{'s' * (len(away) > 1)} {', '.join(map(str, away[:5]))}"
            more = f" and {len(away) - 5} more" if len(away) > 5 else ""
            what, log = f"the SuperLink to admit the SuperNodes of {clients}{more}", self._nodes[away[0]].log
        else:
            what, log = then, self.server_log
        return f"waiting for {what}. The end of {short(log)}: {printable(tail(log, 1)) or 'nothing yet'}"

    def use_our_commands(self) -> None:
        """Put our commands on the PATH of SuperLink and SuperNodes. If that fails, show the consequence."""
        try:
            path = CommandFolder(SERVER_COMMANDS).first_on(self._env.get("PATH"))
            self._link_env = {**self._env, "PATH": path}
            if self.plan.fast_start:
                nodes = self.plan.clients
                with_lease = self.plan.gives_leases
                self._node_env = fast_start(self._env, with_lease=with_lease, nodes=nodes, are_told=True)
        except ConfigError as error:
            consequence = "messages start as slowly as Flower's own, and rounds are not shown while they run"
            if self.plan.gives_leases:
                consequence += f"; without gpu_mod in {self.plan.app.name} its clients have no leases"
            self._say(f"{consequence}: {error}")

    def _warm_up(self) -> None:
        app = self.plan.app
        # Otherwise, each client of the first round would import them. Six clients on two cores took 20 s.
        command = warm_up_command(libraries_of(app.path, app.clientapp.partition(":")[0]))
        env = self._client_environment(self._env, 0)
        self._supervisor.start(Service("warm-up", command, env, self.folder.log("warm-up")))
        self._supervisor.fork_programs(self._env, self.folder.log("programs"))

    def _start_link(self) -> None:
        """Start the SuperLink and wait until it answers. Try another port if its port is taken meanwhile."""
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self._port = ports.free_ports(1)[0]
            self._link = self.link_service(self._port)
            self._supervisor.start(self._link)
            while self._link.runs:
                answers = ports.is_healthy(self._port)
                if answers and self._link.pid and ports.listens(self._link.pid, self._port):
                    return
                self._supervisor.wait(0.05)
            if attempt == PORT_ATTEMPTS or not self._link.port_was_taken:
                raise _died(self._link)

    def link_service(self, port: int) -> Service:
        """Return the service of a SuperLink that listens on ``port``, for this host only."""
        command = ["flower-superlink", "--insecure", "--host", ports.HOST, "--port", str(port)]
        if self._env[NOT_INSTALLED] == "1":
            command += ["--disable-runtime-dependency-installation"]
        return Service("SuperLink", command, self._link_env, self.folder.log("superlink"))

    def _node(self, client: int, port: int) -> Service:
        command = ["flower-supernode", "--insecure", "--superlink", f"{ports.HOST}:{self._port}"]
        command += ["--host", ports.HOST, "--port", str(port)]
        command += ["--node-config", format_pairs(self.plan.node_config_of(client))]
        if self._env[NOT_INSTALLED] != "1":
            command.append(OPTION)
        env = self._client_environment(self._node_env, client)
        return Service(f"SuperNode of client {client}", command, env, self.folder.log(f"client-{client}"))

    def _client_environment(self, env: Mapping[str, str], client: int) -> dict[str, str]:
        node_config = self.plan.node_config_of(client)
        return client_environment(env, client, self.plan.clients_at_once, node_config)

    def app_folder(self) -> Path:
        """Return the folder that ``flwr run`` bundles.

        If the logs of runs are in the app's folder, return a copy of the app without them.
        """
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

    def client_of(self, node_id: int) -> str:
        """Return the number of a node's client, as logged by its SuperNode, or a text with the node's id."""
        if node_id not in self._clients_of_nodes:
            self._clients_of_nodes = clients_of_nodes(self.folder)
        return str(self._clients_of_nodes.get(node_id, f"node {node_id}"))

    def traceback_of(self, client: str) -> str:
        """Return the last traceback in a client's log, or an empty text."""
        return last_traceback(self.folder.log(f"client-{client}"))

    def has_finished(self) -> bool:
        """Return True if the run has completed. Starts processes again if needed.

        Raises LaunchFailedError if the run cannot complete.
        """
        if self._status_query is not None:
            return self._has_completed(self._status_query)
        if not self._link.runs:
            raise _died(self._link)
        for client, node in enumerate(self._nodes):
            if not node.runs:
                self._restart_or_fail(client, node)
        if self._run.runs:
            self._fail_if_nodes_never_suffice()
            return False
        if self._run.returncode != 0:
            raise LaunchFailedError(self._run.describe_end(), self._run)
        # SuperNodes need some time to end, and so does the query. So both run at the same time.
        for node in self._nodes:
            node.send(signal.SIGTERM)
        self._query_status()
        return False

    def _restart_or_fail(self, client: int, node: Service) -> None:
        if self._node_attempts[client] == PORT_ATTEMPTS or not node.port_was_taken:
            raise _died(node)
        self._node_attempts[client] += 1
        self._nodes[client] = self._node(client, ports.free_ports(1)[0])
        self._supervisor.start(self._nodes[client])

    def _fail_if_nodes_never_suffice(self) -> None:
        for line in new_lines(self._server_lines):
            match = _WAITING.search(line)
            if match and (needed := int(match[1])) > self.plan.clients:
                raise LaunchFailedError(
                    f"the strategy of {self.plan.app.name} waits for {needed} clients, but there are "
                    f"{self.plan.clients}: give --clients {needed}, or lower min_available_nodes in the app"
                )

    def _query_status(self) -> None:
        command = ["flwr", "list", CONNECTION, "--format", "json"]
        self._status_query = Service("flwr list", command, self._env, self.folder.log("flwr-list"))
        self._supervisor.start(self._status_query)

    def _has_completed(self, query: Service) -> bool:
        if query.runs:
            return False
        if query.returncode != 0:
            raise LaunchFailedError(f"{query.describe_end()}: the outcome of the run is not known", query)
        status, details = run_status(query.log.read_text(encoding="utf-8", errors="replace"))
        if status == "finished:completed":
            return True
        if status.startswith("finished"):
            text = "" if details in ("", "N/A") else f": {first_line(details)}"
            raise LaunchFailedError(f"Flower reports the run as {status}{text}", self._run)
        # The log stream broke off, but the run goes on.
        self._query_status()
        return False


def _died(service: Service) -> LaunchFailedError:
    """Return the error about a service that exited before the end of the run."""
    return LaunchFailedError(f"{service.describe_end()} before the run was over", service)


def run_status(text: str) -> tuple[str, str]:
    """Return status and details of the only run in the output of ``flwr list --format json``.

    Raises LaunchFailedError if the output contains no status.
    """
    try:
        last = text.rpartition("\n$ ")[2]  # Each start writes a line that begins with "$ " to the log.
        answer, _ = json.JSONDecoder().raw_decode(last[last.index("{") :])
        run = answer["runs"][0]
        return str(run["status"]), str(run.get("status-details") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise LaunchFailedError(f"flwr list gave no status of the run: {text.strip()[:200]}") from None
