"""One simulated run: the ServerApp runs in this process, the virtual nodes in workers of one or more hosts.

:func:`simulate` puts a run together. :class:`RunPlan` checks the arguments, :class:`_Record` opens the run's
folder and trace, the hosts start workers, and the grid sends the ServerApp's messages to the hosts.

All parts close in the reverse order on an ``ExitStack``, so the order of the callbacks matters. First the
grid closes, so that no message is sent. Then the hosts end their workers, and after that the dispatcher's
threads end. Only then is the trace complete and the result is made of it. The summary is shown last, because
trackers may log warnings while they end.

Only one run at a time is possible in a process. Environment variables, Flower's classes and Flower's task
identity belong to the whole process.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Unpack, cast

import numpy as np
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.server_app import LoadServerAppError
from flwr.supercore.object_ref import load_app
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flower_gpu import files, frameworks, standard_streams, trace
from flower_gpu.apps.app import FlowerApp
from flower_gpu.apps.app_exit import describe_exit
from flower_gpu.apps.dependencies import missing_packages_named, missing_packages_note
from flower_gpu.apps.folder import RunFolder
from flower_gpu.apps.recording import RecordedRun, recorded_run
from flower_gpu.errors import ConfigError
from flower_gpu.flower import message_call
from flower_gpu.options import RUN_DIR_VARIABLE, documented
from flower_gpu.printable import told_if_slow
from flower_gpu.simulation import determinism
from flower_gpu.simulation.client_output import ClientOutput
from flower_gpu.simulation.dispatcher import Dispatcher, Durations
from flower_gpu.simulation.grid import SimulationGrid
from flower_gpu.simulation.host import Hosts
from flower_gpu.simulation.in_worker import seed_of
from flower_gpu.simulation.local_host import LocalHost
from flower_gpu.simulation.options import OPTIONS, SimulationOptions
from flower_gpu.simulation.plan import RunPlan
from flower_gpu.simulation.reporting import Report, reported
from flower_gpu.simulation.simulation_result import SimulationResult
from flower_gpu.strategies.recording.recorded_grid import RecordedGrid
from flower_gpu.strategies.recording.recorder import finite
from flower_gpu.strategies.resuming.checkpoint import Checkpoints
from flower_gpu.strategies.resuming.states import StateStore
from flower_gpu.strategies.rounds import RoundState
from flower_gpu.watch.trackers import tracking
from flower_gpu.workers.own_process import restored_environment

_is_running: Final = threading.Lock()


def simulate(
    app: str | Path | tuple[ServerApp, ClientApp],
    num_supernodes: int,
    **options: Unpack[SimulationOptions],
) -> SimulationResult:
    """Run a Flower app on virtual nodes, and return its result.

    The ServerApp runs in this process. The ClientApp handles each message in a worker process, which holds a
    lease if it uses a GPU.

    Parameters
    ----------
    app : str, Path, or tuple of ServerApp and ClientApp
        Folder of the app with its ``pyproject.toml``, or the two apps themselves, as in a notebook.
    num_supernodes : int
        Number of virtual nodes. Their node configs contain ``partition-id`` and ``num-partitions``.
    **options
        The options of :class:`flower_gpu.SimulationOptions`, which are listed at the end. Options of each
        message's worker, and its share of a GPU: see :class:`flower_gpu.CallOptions`.

    Returns
    -------
    SimulationResult
        The server's context, the final model, the summary and the rounds.

    Raises
    ------
    ConfigError
        If an argument cannot be used, or this process already simulates another run.
    SimulationStoppedError
        After Ctrl-C.
    ClientsFailedError
        If every client failed, unless ``keep_going``.
    NotDeterministicError
        If a deterministic run might have another result the next time, unless ``keep_going``.
    Exception
        Any error that the ServerApp raised.

    Examples
    --------
    >>> result = simulate("examples/quickstart", 100, rounds=5)
    """
    standard_streams.fill()
    plan = RunPlan.of(app, num_supernodes, options)
    progress, client_output = plan.options["progress"], plan.options["client_output"]
    with ExitStack() as stack:
        stack.enter_context(_alone())
        # Without progress there are no round lines that client output could push out of sight.
        shows_all = client_output == "auto" and not progress
        output = ClientOutput("all" if shows_all else client_output)
        hosts = _hosts(plan, stack, output)
        if plan.work.is_deterministic:
            determinism.check_same(plan.earlier, hosts.info.described, is_strict=plan.work.is_strict)
        record = _Record(plan, hosts, stack)
        nodes = plan.work.nodes
        if plan.work.is_deterministic:
            stack.enter_context(determinism.applied(plan.server_env))
        stack.enter_context(_identity(nodes.run_id))
        report = record.report(plan, hosts, stack, output)
        grid = _grid(plan, record, hosts, report, stack)
        context = Context(nodes.run_id, SUPERLINK_NODE_ID, {}, RecordDict(), dict(nodes.run_config))
        recorded = RecordedGrid(grid, report.recorder, record.checkpoints, record.state)
        _run_server(plan, hosts, recorded, context, report.shown.say)
        model = report.recorder.model
    path = None if record.folder is None else record.folder.path
    return SimulationResult(
        context, model, report.summary, path, plan.work.name, report.shown.history.rounds.parts
    )


simulate.__doc__ = documented(simulate.__doc__, "Other Parameters", OPTIONS)


class _Record:
    """The files of a run: its folder, trace, states and checkpoints. A resumed run also has its last state.

    Without a folder there is no trace and no checkpoint, and the states are in a temporary folder.
    """

    def __init__(self, plan: RunPlan, hosts: Hosts, stack: ExitStack) -> None:
        """Create the folder, or use the folder of the earlier run. ``stack`` closes all files."""
        # This comes before anything is written, because the library of a tracker may be missing.
        self._followers = tracking.Tracking(tuple(plan.options["trackers"] or ()))
        self.folder = plan.folder
        settings = dict(plan.earlier)
        log_dir = plan.options["log_dir"]
        if self.folder is None and log_dir is not None:
            settings = plan.settings(hosts)
            self.folder = RunFolder.create(Path(log_dir))
        self._report: Report | None = None
        self._run: RecordedRun | None = None
        # First in, last out: trackers may log warnings while they end, and the summary comes after these.
        stack.callback(self._show_summary)
        if self.folder is None:
            stack.callback(self._conclude)
        else:
            self._begin(self.folder, plan, hosts, settings, stack)
        self.states = StateStore(_state_folder(self.folder, stack), int(plan.options["state_memory"]))
        stack.callback(self.states.close)
        self.checkpoints: Checkpoints | None = None
        self.state: RoundState | None = None  # state of the run that is resumed
        if self.folder is not None:
            self.checkpoints = Checkpoints(self.folder.checkpoint, self.states, plan.identity(hosts))
            self.state = self.checkpoints.read() if plan.resumes else None

    def _begin(
        self,
        folder: RunFolder,
        plan: RunPlan,
        hosts: Hosts,
        settings: Mapping[str, Any],
        stack: ExitStack,
    ) -> None:
        """Begin the trace. A resumed run does not write into it before all checks have passed."""
        stack.enter_context(restored_environment([RUN_DIR_VARIABLE]))
        os.environ[RUN_DIR_VARIABLE] = str(folder.path)
        name, clients = plan.work.name, len(plan.work.nodes.ids)
        facts = {"run_config": plan.work.nodes.run_config, "clients": clients, "engine": "simulate"}
        facts = {**settings, **plan.identity(hosts), **facts}
        # First in, last out: the last look at the GPUs is when all workers are gone, and trackers get it.
        stack.enter_context(self._followers.following(folder.path, name, facts, resumes=plan.resumes))
        stack.callback(self._conclude)
        self._run = stack.enter_context(
            recorded_run(
                folder.path,
                "simulate",
                name,
                clients=clients,
                settings=finite(settings),
                begins=not plan.resumes,
            )
        )

    def report(
        self,
        plan: RunPlan,
        hosts: Hosts,
        stack: ExitStack,
        output: ClientOutput,
    ) -> Report:
        """Begin to show and record the run, and return its report."""

        def begin_again() -> None:
            if self._run is not None:
                self._run.begin()
            hosts.has_begun()

        self._report = report = Report(
            self.folder,
            self._run,
            output,
            progress=plan.options["progress"],
            resumes=self.state,
            on_resume=begin_again,
            is_tracked=self._followers.is_on,
        )
        if self.folder is None:
            name, clients = plan.work.name, len(plan.work.nodes.ids)
            report.shown.history.feed(
                [trace.make("run_started", kind="simulate", name=name, clients=clients)]
            )
        partition_of = plan.work.nodes.partition_of
        stack.enter_context(
            reported(
                report, partition_of, verbose=plan.options["verbose"], keep_going=plan.options["keep_going"]
            )
        )
        report.recorder.concurrency = hosts.info.concurrency
        return report

    def _conclude(self) -> None:
        if self._report is not None:
            self._report.conclude()

    def _show_summary(self) -> None:
        if self._report is not None:
            self._report.show_summary()


def _grid(plan: RunPlan, record: _Record, hosts: Hosts, report: Report, stack: ExitStack) -> SimulationGrid:
    """Return the grid of a run, which sends messages to the hosts. ``stack`` closes it and the hosts."""
    work, nodes, durations = plan.work, plan.work.nodes, Durations()
    # With a single worker, the order does not change the duration.
    has_longest_first = plan.options["order"] == "longest" and hosts.info.concurrency > 1
    dispatcher = Dispatcher(nodes, record.states, nodes.seed, durations)
    grid = SimulationGrid(
        Run.create_empty(nodes.run_id),
        dispatcher,
        durations=durations if has_longest_first else None,
        sums_in_order=work.is_deterministic,
        is_strict=work.is_strict,
    )
    # Called after the hosts have closed. Once the threads have ended, Ray can be disconnected.
    stack.callback(dispatcher.wait)
    stack.callback(hosts.close)
    stack.callback(grid.close)
    hosts.begin(dispatcher.joined)
    grid.tell = report.recorder.tell
    if not plan.resumes:
        hosts.has_begun()
    report.shown.say(hosts.location_line())
    if has_longest_first:
        report.recorder.expected_s = lambda kind, ids: durations.expected_s(
            [(kind, nodes.place_of(node_id)) for node_id in ids]
        )
    stack.callback(lambda: report.facts.update(hosts.facts()))
    return grid


def _run_server(
    plan: RunPlan, hosts: Hosts, grid: RecordedGrid, context: Context, say: Callable[[str], None]
) -> None:
    """Import the ServerApp, preload the workers' data, and run the ServerApp until it returns."""
    with _seeded(plan.work.nodes.seed), missing_packages_named(plan.app_folder):
        server, name = plan.server, plan.work.name
        if plan.app_folder is not None and (text := missing_packages_note(FlowerApp.load(plan.app_folder))):
            say(f"note: {text}")
        if isinstance(server, str):
            with told_if_slow(say, f"importing {server.partition(':')[0]} of {name}"):
                server = _loaded(server, plan.app_folder)
        with told_if_slow(say, f"preparing the workers of {name}"):
            hosts.load_data()
        server(grid=cast(Grid, grid), context=context)
    grid.close()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed every random number generator that the ServerApp may use.

    Strategies sample nodes with Python's or NumPy's generator. Apps initialize their model with the generator
    of a framework. If the app imports the framework later, it is seeded right after the import.
    """
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    framework_seed = seed_of(f"{seed} server")
    with frameworks.each_loaded(lambda framework, _: framework.seed(framework_seed)):
        yield


def _hosts(plan: RunPlan, stack: ExitStack, output: ClientOutput) -> Hosts:
    """Return this machine as the only host, or the hosts of a Ray cluster."""
    address = plan.options["ray_address"]
    if address is None:
        return LocalHost(plan.work, output.admit)
    from flower_gpu.simulation.cluster.hosts import RayHosts, connected

    stack.enter_context(connected(address, plan.work.app))
    return RayHosts(plan.work)


def _loaded(reference: str, folder: Path | None) -> ServerApp:
    try:
        loaded = load_app(reference, LoadServerAppError, folder)
    except SystemExit as error:
        raise ConfigError(describe_exit(error, "ServerApp")) from error
    if not isinstance(loaded, ServerApp):
        raise ConfigError(f"{reference} is a {type(loaded).__name__}, not a ServerApp")
    return loaded


@contextmanager
def _alone() -> Iterator[None]:
    """Prevent a second run in this process: runs change its environment, Flower's classes and identity."""
    if not _is_running.acquire(blocking=False):
        raise ConfigError(
            "this process already simulates a run, and can simulate one at a time: wait for its end, or "
            "start the other one in another process"
        )
    try:
        yield
    finally:
        _is_running.release()


@contextmanager
def _identity(run_id: int) -> Iterator[None]:
    """Give this process the identity of a SuperLink's task. Without one, Flower creates no messages."""
    previous = message_call.identity()
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SUPERLINK_NODE_ID, 1
    try:
        yield
    finally:
        message_call.assume(previous)


def _state_folder(folder: RunFolder | None, stack: ExitStack) -> Path:
    if folder is not None:
        return folder.states
    return stack.enter_context(files.temporary_folder("states"))
