"""One launch from its plan to its result."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder, short
from flower_gpu.apps.recording import recorded_run
from flower_gpu.launch.event_lines import EventLines
from flower_gpu.launch.federation import Federation, client_environment, service_environment
from flower_gpu.launch.options import LaunchOptions
from flower_gpu.launch.plan import Plan, make_plan
from flower_gpu.launch.supervisor import LaunchFailedError, LaunchStoppedError, Supervisor, new_lines
from flower_gpu.options import CALL, RUN_DIR_VARIABLE, USE_GPU
from flower_gpu.printable import told_if_slow
from flower_gpu.simulation import determinism
from flower_gpu.watch.history import History
from flower_gpu.watch.result import places_of, result_lines, result_of, write_results
from flower_gpu.watch.shown_run import ShownRun
from flower_gpu.watch.trackers import tracking

_NO_ROUNDS: Final = (
    "No rounds are known, because the app runs none of Flower's strategies. Evaluations with "
    "flower_gpu.gpu_evaluate are always shown."
)
#: Stages before the first call, by the event that begins the stage: a line about the stage, and the event
#: that ends it. Empty texts mean that the first call has begun.
_STAGES: Final = {
    "strategy_started": (
        "the server runs, and waits for its clients",
        "the ServerApp to send its first message",
    ),
    "round_started": (
        "messages are sent to clients, which import the app",
        "the first client to begin with its message",
    ),
    "worker_started": ("", ""),
    "reply": ("", ""),
}
_TICK_S: Final = 0.2
# Flower has reported the outcome by then, so the processes that still run have no more work.
_GRACE_AT_END_S: Final = 0.5


def launch(options: LaunchOptions) -> int:
    """Run an app with these options, show its progress, and write its result to the run's folder.

    Returns 0 if Flower reports the run as completed, 1 if it failed, or 128 + n if signal n stopped it.

    Raises ConfigError if the options cannot be used. Nothing has been started or written then.
    """
    plan = make_plan(options)
    settings = settings_of(plan)
    resumes = plan.folder is not None
    trackers = plan.options.tracker
    if plan.folder is not None and not trackers:
        trackers = tuple(tracking.known(plan.folder.path))
    followers = tracking.Tracking(trackers)
    folder = plan.folder or RunFolder.create(plan.options.log_dir)
    events = trace.Follower(folder.trace)
    events_before = events.read_new()
    code = 0
    federation: Federation | None = None

    def client_of(node: int) -> str:
        return str(node) if federation is None else federation.client_of(node)

    with (
        followers.following(
            folder.path,
            plan.app.name,
            {**settings, "clients": plan.clients},
            resumes=resumes,
            client_of=client_of,
        ),
        recorded_run(
            folder.path,
            "launch",
            plan.app.name,
            clients=plan.clients,
            num_rounds=plan.num_rounds,
            settings=settings,
        ) as run,  # Entered first: it locks the run before the supervisor may kill its processes.
        Supervisor(f"{RUN_DIR_VARIABLE}={folder.path}") as supervisor,
    ):
        shown = ShownRun(sys.stdout, sys.stderr, folder.failures, is_shown=options.verbosity >= 0)
        shown.history.rounds.num_rounds = plan.num_rounds
        shown.history.feed(events_before)
        try:
            shown.say(headline(plan, folder))
            for remark in plan.remarks:
                shown.say(remark)
            env = service_environment(os.environ, folder, options.calls)
            federation = Federation(plan, folder, env, supervisor, shown.say)
            lines = EventLines(shown, federation.client_of, federation.traceback_of)
            try:
                _follow(federation, supervisor, shown, lines, events, options)
            finally:
                rounds = shown.history.rounds
                run.end_told = {"messages": rounds.messages_sent, "failed": rounds.messages_failed}
            supervisor.stop(grace_s=_GRACE_AT_END_S)
        except LaunchStoppedError as stopped:
            code = 128 + stopped.signum
            run.outcome = "interrupted"
            shown.close()
            _complain(f"stopping, {stopped}")
        except LaunchFailedError as failure:
            code = 1
            run.outcome = "failed"
            run.end_told["error"] = str(failure)
            shown.close()
            _explain(failure)
        finally:
            shown.close()
            if folder.model.exists():
                run.end_told["facts"] = {"model": folder.model.name}
    for pid in supervisor.unkilled:
        _complain(f"process {pid} could not be ended: it hangs in the kernel, as in the driver (see dmesg)")
        code = code or 1
    _conclude(plan, folder, code, shown, client_of)
    return code


def headline(plan: Plan, folder: RunFolder) -> str:
    """Return a line with the sizes of the run and the folder of its logs."""
    counts = [f"{plan.clients} client" + "s" * (plan.clients > 1)]
    if plan.num_rounds is not None:
        counts.append(f"{plan.num_rounds} round" + "s" * (plan.num_rounds > 1))
    return f"{plan.app.name}: {', '.join(counts)}; logs in {folder.shown}"


def settings_of(plan: Plan) -> dict[str, object]:
    """Return the settings of a run, for its record."""
    return {
        "app": plan.app.name,
        "app_folder": str(plan.app.path),
        "serverapp": plan.app.serverapp,
        "clientapp": plan.app.clientapp,
        "run_config": plan.run_config,
        "versions": determinism.versions(),
        "node_config": dict(plan.options.node_config),
        "node_configs": [plan.node_config_of(client) for client in range(plan.clients)],
        "start_method": plan.options.calls.get("start_method"),
        "timeout_s": plan.options.calls.get("timeout_s"),
        "gpu": {
            name: plan.options.calls.get(name) for name, option in CALL.items() if option.group == "GPUs"
        },
        "fast_start": plan.fast_start,
        "client_omp_num_threads": client_environment(os.environ, 0, plan.clients_at_once)["OMP_NUM_THREADS"],
    }


def _follow(
    federation: Federation,
    supervisor: Supervisor,
    shown: ShownRun,
    lines: EventLines,
    events: trace.Follower,
    options: LaunchOptions,
) -> None:
    """Start the run, and show its progress until it has finished."""
    log = trace.Follower(federation.server_log)
    log.read_lines()  # Skips the lines of the run that this run resumes.
    stage = contextlib.ExitStack()
    stages = dict(_STAGES)  # stages that have not begun

    def show() -> None:
        for event in events.read_new():
            shown.show(event)
            if (begun := stages.pop(event["event"], None)) is not None:
                stage.close()
                text, then = begun
                if text:
                    stage.enter_context(told_if_slow(shown.say, text, partial(federation.missing, then)))
                else:
                    stages.clear()
            lines.see(event)
        for line in new_lines(log) if options.verbosity > 0 else ():
            shown.say(line)
        shown.tick()
        if lines.why_over is not None and not options.keep_going:
            raise LaunchFailedError(f"{lines.why_over}; --keep-going lets such a run continue")

    federation.start()
    starting = f"starting {federation.plan.clients} SuperNodes and the ServerApp"
    stage.enter_context(told_if_slow(shown.say, starting, federation.missing))
    try:
        while not federation.has_finished():
            show()
            supervisor.wait(_TICK_S)
    finally:
        stage.close()
        # An app may exit with an error because all its clients have failed. Their failures must be shown.
        show()


def _explain(failure: LaunchFailedError) -> None:
    _complain(str(failure))
    if failure.service is not None:
        _complain(f"end of {short(failure.service.log)}:")
        for line in failure.service.tail().splitlines():
            _complain(f"  {line}", prefix="")


def _complain(text: str, prefix: str = "flower-gpu launch: ") -> None:
    with contextlib.suppress(OSError):
        print(f"{prefix}{text}", file=sys.stderr, flush=True)


def _conclude(
    plan: Plan, folder: RunFolder, code: int, shown: ShownRun, client_of: Callable[[int], str]
) -> None:
    """Write and show the result. A failed run also has a result, because its finished rounds are valid."""
    history = History.read(folder.trace, keep_finished=False)
    result = result_of(history, client_of)
    write_results(folder, history.rounds.parts, result)
    if code != 0:
        if folder.failures.exists():
            _complain(f"all failures are in {short(folder.failures)}")
        if code == 1:
            _complain(f"report: flower-gpu report {folder.shown}")
        _complain(f"all logs are in {folder.shown}")
        if folder.has_checkpoint:
            _complain(
                "to continue after the last finished round, add this to the same command: "
                f"--resume {folder.shown}"
            )
        return
    if not result["rounds"] and not result["initial"]:
        shown.show_end([_NO_ROUNDS])
    for remark in remarks_at_end(plan, history):
        _complain(remark)
    shown.show_end(result_lines(result, places=places_of(folder)))


def remarks_at_end(plan: Plan, history: History) -> Iterator[str]:
    """Yield remarks about unexpected use of GPUs by the app."""
    forced = plan.policies & {"force", "require"}
    key, leased = USE_GPU.run_config_key, history.tally.leases.granted
    if plan.run_config.get(key) is False and leased and not forced:
        yield (
            f"{key} is false, but {leased} calls leased a GPU: {plan.app.name} "
            "must give context=context to its GPUClient and gpu_evaluate"
        )
    is_on_gpus = history.hosts.gpus and history.rounds.messages_sent and plan.policies != {"never"}
    if is_on_gpus and not history.tally.workers_started:
        yield (
            f"no call of {plan.app.name} had a lease: its clients used the GPUs as if each had them alone. "
            "Write ClientApp(mods=[gpu_mod]) in it, or run it with flower-gpu simulate, which needs no change"
        )
