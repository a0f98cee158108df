"""Several SuperNodes of one command: how they are started, watched and restarted.

A SuperNode that exits is started again, because its SuperLink may have been unreachable, or a user may have
killed the process. Some faults are permanent: an unknown option, an invalid address, or TLS with a SuperLink
that has no certificates. A permanent fault ends the command at once. Other faults may be temporary, so the
command ends after three failed starts in a row.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from flower_gpu import options, trace
from flower_gpu.apps.app import ConfigValue, format_pairs
from flower_gpu.apps.folder import RunFolder
from flower_gpu.apps.recording import recorded_run
from flower_gpu.launch import ports
from flower_gpu.launch.options import node_config_of
from flower_gpu.launch.supernode_log import COMMAND, Notices, has_tried_to_connect, reason_in, stays
from flower_gpu.launch.supervisor import LaunchStoppedError, Service, Supervisor, without_colours
from flower_gpu.options import CLIENT_VARIABLE, RUN_DIR_VARIABLE, CallOptions
from flower_gpu.printable import path_text, printable
from flower_gpu.programs.node_logs import has_connected, last_output

#: Flower's options for a node's config, and for the key by which a SuperLink knows the node.
NODE_CONFIG: Final = "--node-config"
KEY: Final = "--auth-supernode-private-key"

_PAUSE_S: Final = 5.0  # pause before a SuperNode is started again
# A SuperNode that exits sooner counts as a failed start, even if the SuperLink had let it in.
_EARLY_S: Final = 20.0
_MOST_FAILED_STARTS: Final = 3
# A SuperNode that the SuperLink refuses keeps asking. Its key may be registered later, or the SuperLink may
# forget the last connection.
_TURNED_AWAY_PAUSE_S: Final = 15.0
# Answer of the SuperLink (flwr.supercore.error.catalog), which the SuperNode logs
_TURNED_AWAY: Final = "Failed to activate SuperNode."
_WHY_TURNED_AWAY: Final = (
    f", and asks every {_TURNED_AWAY_PAUSE_S:g} s: the SuperLink does not know its key, or still counts it "
    "as connected, as for up to two minutes after a SuperNode was killed. If the key is new, the SuperLink's "
    "operator runs: flwr supernode register FILE.pub"
)
_LOOK_S: Final = 0.5  # longest time between two looks at all SuperNodes


class NeverStartsError(Exception):
    """A SuperNode cannot be started. The message gives the reason."""


class SuperNode:
    """One SuperNode, which is started again when it exits. The first lines of this file give the rules."""

    def __init__(
        self,
        number: int,
        count: int,
        flower_options: Sequence[str],
        pairs: Mapping[str, ConfigValue],
        calls: CallOptions,
        env: Mapping[str, str],
        logs: RunFolder,
        *,
        has_key: bool = False,
    ) -> None:
        config = {"partition-id": number, "num-partitions": count, **pairs, **node_config_of(calls, number)}
        self.options = [*flower_options, NODE_CONFIG, format_pairs(config)]
        self._has_key = has_key
        self.env = {**options.node_environment(env, config), CLIENT_VARIABLE: str(config["partition-id"])}
        self._name = f"SuperNode {number}"
        self._log = logs.log(f"supernode-{number}")
        self._new_lines = trace.Follower(self._log)
        self._service: Service | None = None
        self._began = 0.0
        self._again_at = 0.0
        self._failed_starts = 0

    def look(self, supervisor: Supervisor, notices: Notices) -> None:
        """Show new messages of its log. Start it if it is not running and its pause is over.

        Raises NeverStartsError if another start would fail, too.
        """
        is_running = self._service is not None and self._service.runs
        notices.look(self._name, self._new_lines, self._log)
        if is_running:
            return
        now = time.monotonic()
        if self._service is not None:
            self._note_end(self._service, now, notices)
        if now >= self._again_at:
            port = ports.free_ports(1)[0]
            command = [COMMAND, "--port", str(port), *self.options]
            self._service = Service(self._name, command, self.env, self._log)
            self._began = now
            supervisor.start(self._service)

    def _note_end(self, service: Service, now: float, notices: Notices) -> None:
        self._service = None
        output = without_colours(last_output(self._log))
        if self._has_key and _TURNED_AWAY in output:
            self._again_at = now + _TURNED_AWAY_PAUSE_S
            notices.turned_away(self._name, _WHY_TURNED_AWAY)
            return
        ending = ": ".join(filter(None, (service.describe_end(), printable(reason_in(output)).rstrip("."))))
        if stays(service.returncode, output):
            raise NeverStartsError(f"{ending}. The whole log is {path_text(self._log)}")
        has_failed = now - self._began < _EARLY_S or not self._has_begun(output)
        self._failed_starts = self._failed_starts + 1 if has_failed else 0
        if self._failed_starts >= _MOST_FAILED_STARTS:
            raise NeverStartsError(
                f"{ending}, {self._failed_starts} times in a row. The end of {path_text(self._log)}:\n"
                f"{service.tail()}"
            )
        notices.starts_again(ending, _PAUSE_S)
        self._again_at = now + _PAUSE_S

    def _has_begun(self, output: str) -> bool:
        """Return True if the last start has reached its SuperLink, or has tried to connect to it."""
        return has_connected(self._log) or has_tried_to_connect(output)


def run(
    nodes: Sequence[SuperNode],
    env: Mapping[str, str],
    logs: RunFolder,
    notices: Notices,
    wait_for_link: Callable[[Callable[[float], object]], object],
) -> int:
    """Run SuperNodes until the user stops them, and return the exit status of the command.

    ``env``: environment that they have in common.
    ``wait_for_link``: waits until the SuperLink listens. It is called with a function that sleeps.
    """
    # Imported late, so that --help works without the dependencies of workers.
    from flower_gpu.programs import commands

    with (
        recorded_run(logs.path, "supernodes", f"{len(nodes)} SuperNodes", clients=len(nodes)) as record,
        Supervisor(f"{RUN_DIR_VARIABLE}={logs.path}") as supervisor,
    ):
        supervisor.fork_programs(env, logs.log("programs"))
        supervisor.start(Service("warm-up", commands.warm_up_command(), env, logs.log("warm-up")))
        try:
            wait_for_link(supervisor.wait)
            while True:
                for node in nodes:
                    node.look(supervisor, notices)
                supervisor.wait(_LOOK_S)
        except LaunchStoppedError:
            record.outcome = "interrupted"
        except NeverStartsError as error:
            record.outcome = "failed"
            print(f"flower-gpu supernode: {error}", file=sys.stderr)
            return 1
    return 0
