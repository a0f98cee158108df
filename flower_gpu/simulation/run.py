"""One simulated run: a ServerApp in this process, its virtual nodes in workers of this or other hosts."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Unpack

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import ServerApp
from flwr.serverapp.server_app import LoadServerAppError
from flwr.supercore.object_ref import load_app
from flwr.supercore.task_identity import TaskIdentity

from flower_gpu import files
from flower_gpu.apps.app import FlowerApp
from flower_gpu.apps.recording import RecordedRun, recorded_run
from flower_gpu.calls.settings import CallSettings
from flower_gpu.errors import ConfigError
from flower_gpu.flower import message_call
from flower_gpu.flower.recording.recorded_grid import RecordedGrid
from flower_gpu.flower.strategy_state import OURS
from flower_gpu.gpu import guard
from flower_gpu.leases.request import memory_bytes
from flower_gpu.options import RUN_DIR_VARIABLE, CallOptions
from flower_gpu.printable import path_text, told_if_slow
from flower_gpu.simulation import determinism, machine, verifying, workers
from flower_gpu.simulation.checkpoint import Checkpoints
from flower_gpu.simulation.durations import LONGEST, ORDERS, OrderWord
from flower_gpu.simulation.engine import Engine, LocalEngine, Rounds
from flower_gpu.simulation.host import Work
from flower_gpu.simulation.in_worker import AppReference, seed_of
from flower_gpu.simulation.messages import MANY
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.reporting import Report, reported_run
from flower_gpu.simulation.results import ResultFolder
from flower_gpu.simulation.simulation_result import SimulationResult
from flower_gpu.simulation.states import StateStore
from flower_gpu.watch.trackers import tracking
from flower_gpu.workers.own_calls import borrowed
from flower_gpu.workers.threads import cores

#: What states of nodes take in memory before they go to the disk.
STATE_MEMORY: Final = "1GiB"

_SEEDS: Final = 1 << 31
_UNNAMED: Final = "app"  # two components without a folder
_is_running: Final = threading.Lock()


def simulate(
    app: str | Path | tuple[ServerApp, ClientApp],
    num_supernodes: int,
    *,
    run_config: Mapping[str, Any] | None = None,
    max_workers: int | None = None,
    calls_per_worker: int | None = None,
    verify_recycling: bool = False,
    order: OrderWord = LONGEST,
    seed: int | None = None,
    log_dir: str | Path | None = "runs",
    resume: str | Path | None = None,
    progress: bool = True,
    verbose: bool | None = None,
    state_memory: int | str = STATE_MEMORY,
    keep_going: bool = False,
    deterministic: bool = False,
    ray_address: str | None = None,
    trackers: str | Sequence[str] | None = None,
    **options: Unpack[CallOptions],
) -> SimulationResult:
    """Run a Flower app on virtual nodes of this machine.

    Its ServerApp runs in this process. Each message to a node is handled by the ClientApp in a worker, which
    has a lease if it uses a GPU.

    Parameters
    ----------
    app : str, Path, or tuple of ServerApp and ClientApp
        The app's folder with its ``pyproject.toml``, or the two apps themselves, as in a notebook.
    num_supernodes : int
        How many virtual nodes there are. They have ``partition-id`` and ``num-partitions`` in their node
        configs.
    run_config : mapping, optional
        Values in the place of the app's own.
    max_workers : int, optional
        How many messages are handled at a time, at most. Default: as many as there are cores (one more
        while messages are short), or as there are shares of the GPUs. Leases and memory may let fewer run.
    calls_per_worker : int, optional
        How many messages a worker handles before it ends, at most. Default: 1000, or 1 with
        ``deterministic``. What it keeps from one message to the next are modules with their globals.
    verify_recycling : bool
        Whether each message of a used worker is handled by a new one as well, to compare the results: a
        check of the app, in which messages are handled more than once.
    order : str
        Which messages of a round are handled first: ``"longest"``, those that are expected to take longest by
        what was learned of their clients, or ``"sent"``, those that the strategy sends first.
    seed : int, optional
        Of the nodes' ids, of sampling, and of the clients' random numbers. Default: drawn, and written down.
    log_dir : str or Path, optional
        Where the folder with the results is made; None keeps none.
    resume : str or Path, optional
        The folder of an earlier run: goes on after its last finished round, with its run config and seed
        where these are not given.
    progress : bool
        Whether progress and a summary are shown, on stderr; in a notebook as bars if it has
        ipywidgets, else as lines.
    verbose : bool, optional
        Whether Flower's log lines are shown. If not, they are in ``run.log`` in the run's folder, and
        warnings and errors are shown as well. Default: shown, but not in a notebook.
    state_memory : int or str
        How much the nodes' states may take in memory together before they go to the disk: ``"1GiB"``, or
        bytes.
    keep_going : bool
        Whether the run goes on when every client failed in its first round, or in three rounds in a row.
    deterministic : bool
        Whether the same seed gives the same model in each bit, whatever the number of workers. What would
        change that ends the run. Python must have been started with ``PYTHONHASHSEED=0``.
    ray_address : str, optional
        Of a Ray cluster whose hosts handle the messages: ``"auto"``, ``"host:port"``, ``"ray://host:port"``.
        Default: this machine does. ``max_workers`` is for each host then.
    trackers : str or sequence of str, optional
        Where figures of rounds, clients and GPUs are sent while the run goes on: ``"tensorboard"``,
        ``"wandb"``, ``"mlflow"``. A resumed run goes on in the trackers' own runs, by default in all of those
        that it had.
    **options
        How each message's worker runs, and how much of a GPU it gets: see :class:`flower_gpu.CallOptions`.

    Returns
    -------
    SimulationResult
        The server's context, the model, a summary, and the rounds.

    Raises
    ------
    ConfigError
        If something that was given cannot be used, or this process simulates another run.
    SimulationStoppedError
        After Ctrl-C.
    ClientsFailedError
        If every client failed, and not ``keep_going``.
    NotDeterministicError
        If a deterministic run had another result the next time, and not ``keep_going``.
    Exception
        What the ServerApp raised.

    Examples
    --------
    >>> result = simulate("examples/quickstart", 100, run_config={"num-server-rounds": 5})
    """
    for label, count in (
        ("num_supernodes", num_supernodes),
        ("max_workers", max_workers),
        ("calls_per_worker", calls_per_worker),
    ):
        if count is not None and count < 1:
            raise ConfigError(f"{label} is a number from 1 on, not {count}")
    if order not in ORDERS:
        raise ConfigError(f"order={order!r} is not one of {', '.join(ORDERS)}")
    settings = CallSettings.resolve(options)  # what is wrong with them is said before anything starts
    settings.host.check()
    guard.check(os.environ)
    folder = ResultFolder.reopen(Path(resume)) if resume is not None else None
    before = folder.read_config() if folder is not None else {}
    name, where, server, client = _components(app)
    if before.get("app", name) != name:
        theirs = _shown(before["app"], before.get("app_folder"))
        raise ConfigError(
            f"--resume {path_text(str(resume))}: that is a run of {theirs}, not of {_shown(name, where)}. "
            "Give that app, or start a new run without --resume"
        )
    given = {**before.get("run_config", {}), **(run_config or {})}
    values = given if where is None else FlowerApp.load(where).simulated(given, num_supernodes)
    if seed is None:
        seed = before.get("seed")
    seed = secrets.randbelow(_SEEDS) if seed is None else seed
    deterministic = deterministic or bool(before.get("deterministic"))
    if trackers is None and folder is not None:
        trackers = tracking.known(folder.path)
    names = tracking.checked(trackers)
    if names and folder is None and log_dir is None:
        raise ConfigError("trackers follow the trace in the run's folder: log_dir=None makes no folder")
    env: dict[str, str] = dict(options.get("env") or {})
    of_all: dict[str, str] = {}
    if deterministic:
        determinism.check_interpreter()
        of_all = determinism.variables({**os.environ, **env}, before.get("threads", 1))
    of_calls: CallOptions = {**options, "env": {**env, **of_all}}
    is_strict = deterministic and not keep_going
    if calls_per_worker is None:
        calls_per_worker = 1 if deterministic else MANY  # what a client leaves in modules is not to be found
    if verify_recycling and calls_per_worker == 1:
        raise ConfigError(
            "there is nothing to verify: with calls_per_worker=1, the default of deterministic runs, no "
            "worker is used again"
        )
    if verify_recycling and ray_address is not None:
        raise ConfigError("verify_recycling is a check on one machine: leave ray_address out")
    work = Work(
        name,
        client,
        of_calls,
        num_supernodes,
        seed,
        max_workers,
        calls_per_worker,
        verify_recycling,
        deterministic,
        is_strict,
    )
    run_id = determinism.run_id(seed) if deterministic else secrets.randbits(63)
    with ExitStack() as stack:
        stack.enter_context(_alone())
        engine = _engine(work, ray_address, run_id, values, stack)
        if deterministic:
            machine.check_same(before, engine.described(), is_strict=is_strict)
        # What a run that goes on must have in common with the run before.
        identity = {"app": name, "num_supernodes": num_supernodes, "seed": seed}
        if deterministic:
            identity |= {"deterministic": True, "threads": engine.threads}
        memory_limit_bytes = memory_bytes(state_memory, "state_memory")
        recorded: RecordedRun | None = None
        followers = tracking.Tracking(names)
        config = dict(before)
        if folder is None and log_dir is not None:
            config = {
                "deterministic": deterministic,
                "threads": engine.threads,
                **identity,
                "app_folder": where,
                "run_config": values,
                "max_workers": engine.concurrency,
                "calls_per_worker": calls_per_worker,
                "verify_recycling": verify_recycling,
                "order": order,
                "state_memory_bytes": memory_limit_bytes,
                "options": {option: _plain(value) for option, value in options.items()},
                "cores": cores(),
                **engine.described(),
            }
            folder = ResultFolder.create(Path(log_dir), config)
        if folder is not None:
            stack.enter_context(borrowed([RUN_DIR_VARIABLE]))
            os.environ[RUN_DIR_VARIABLE] = str(folder.path)
            told = config | identity | {"run_config": values, "clients": num_supernodes, "engine": "simulate"}
            # First in, last out: the last look at the GPUs is when all workers are gone, and trackers get it.
            following = followers.following(folder.path, name, told, resumes=resume is not None)
            stack.enter_context(following)
            recorded = stack.enter_context(
                recorded_run(folder.path, "simulate", name, clients=num_supernodes, begins=resume is None)
            )
            if recorded.is_elsewhere:
                raise ConfigError(f"--resume {resume}: another process goes on with this run already")
        states = StateStore(_state_folder(folder, stack), memory_limit_bytes)
        stack.callback(states.close)
        checkpoints = state = None
        if folder is not None:
            checkpoints = Checkpoints(folder.checkpoint, states, identity)
            stack.callback(checkpoints.close)
            state = checkpoints.read() if resume is not None else None
        if deterministic:
            stack.enter_context(determinism.here(seed_of(f"{seed} server"), of_all))
        nodes = VirtualNodes(num_supernodes, seed, run_id, values, states)
        stack.enter_context(_identity(run_id))
        report: Report | None = None
        stack.callback(lambda: _count(recorded, report))
        report = stack.enter_context(
            reported_run(
                folder,
                num_supernodes,
                nodes.partition_of,
                progress=progress,
                verbose=verbose,
                resumed_round=None if state is None else state.server_round,
                resumed_strategy=OURS if state is None else state.strategy,
                on_resume=lambda: _begin(recorded, engine),
                keep_going=keep_going,
                is_tracked=followers.is_on,
            )
        )
        report.recorder.concurrency = engine.concurrency
        has_longest_first = order == LONGEST and engine.concurrency > 1  # with one worker no order is faster
        rounds = Rounds(run_id, nodes, states, checkpoints, state, has_longest_first)
        grid = engine.open(rounds, stack.callback)
        grid.tell = report.recorder.tell
        if resume is None:
            engine.has_begun()
        report.say(engine.where())
        if verify_recycling:
            report.say(verifying.NOTE)
        if has_longest_first:
            report.recorder.expected_s = lambda kind, ids: engine.durations.expected_s(
                [(kind, nodes.find(node_id)) for node_id in ids]
            )
        stack.callback(lambda: report.facts.update(engine.facts()))
        workers.seed_server(seed)
        context = Context(run_id, SUPERLINK_NODE_ID, {}, RecordDict(), dict(values))
        recorded_grid = RecordedGrid(grid, report.recorder)
        if isinstance(server, str):
            with told_if_slow(report.say, f"importing {server.partition(':')[0]} of {name}"):
                server = _loaded(server, where)
        with told_if_slow(report.say, f"preparing the workers of {name}"):
            engine.load_data()
        server(grid=recorded_grid, context=context)
        recorded_grid.close()
        grid.close()  # here workers that wait for another message end by themselves
        model = report.recorder.model
    return SimulationResult(
        context, model, report.summary, None if folder is None else folder.path, name, report.history.rounds
    )


def _engine(
    work: Work, ray_address: str | None, run_id: int, run_config: Mapping[str, Any], stack: ExitStack
) -> Engine:
    """Return what handles messages: this machine, or the hosts of a cluster."""
    if ray_address is None:
        return LocalEngine(work)
    from flower_gpu.simulation.cluster.engine import ClusterEngine
    from flower_gpu.simulation.cluster.hosts import connected

    stack.enter_context(connected(ray_address, work.app))
    return ClusterEngine(work, run_id, run_config)


def _begin(recorded: RecordedRun | None, engine: Engine) -> None:
    """Have the trace say that a run which goes on has begun again."""
    if recorded is not None:
        recorded.begin()
    engine.has_begun()


def _count(recorded: RecordedRun | None, report: Report | None) -> None:
    """Have the run's end in the trace say how many messages failed."""
    if recorded is not None and report is not None:
        recorded.messages, recorded.failed = report.summary.get("messages"), report.summary.get("failed")


def _components(
    app: str | Path | tuple[ServerApp, ClientApp],
) -> tuple[str, Path | None, ServerApp | str, ClientApp | AppReference]:
    """Return what an app is called, where it is if it has a folder, and its two components."""
    if isinstance(app, tuple):
        server, client = app
        if not isinstance(server, ServerApp) or not isinstance(client, ClientApp):
            raise TypeError("an app is a folder, or a ServerApp and a ClientApp")
        return _UNNAMED, None, server, client
    found = FlowerApp.load(Path(app))
    return found.name, found.path, found.serverapp, AppReference(found.path, found.clientapp)


def _loaded(reference: str, folder: Path | None) -> ServerApp:
    loaded = load_app(reference, LoadServerAppError, folder)
    if not isinstance(loaded, ServerApp):
        raise ConfigError(f"{reference} is a {type(loaded).__name__}, not a ServerApp")
    return loaded


def _shown(name: str, folder: object) -> str:
    return f"{name} ({path_text(str(folder))})" if folder else name


@contextmanager
def _alone() -> Iterator[None]:
    """Have no other run in this process: variables, Flower's classes and its identity are the process's."""
    if not _is_running.acquire(blocking=False):
        raise ConfigError(
            "this process simulates a run already, and can do one at a time: wait for its end, or start the "
            "other one in a process of its own"
        )
    try:
        yield
    finally:
        _is_running.release()


@contextmanager
def _identity(run_id: int) -> Iterator[None]:
    """Be the SuperLink's side of a run: else Flower lets nobody make a message."""
    before = {name: getattr(TaskIdentity, name) for name in message_call.IDENTITY}
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SUPERLINK_NODE_ID, 1
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _state_folder(folder: ResultFolder | None, stack: ExitStack) -> Path:
    if folder is not None:
        return folder.path / "states"
    return stack.enter_context(files.temporary_folder("states"))
