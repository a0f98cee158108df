"""The one table of options: types, help, defaults, environment variables, and the commands that have them.

    CallOptions, VARIABLES, launch.options.LaunchOptions       one line for each option
      |-> kinds.add_arguments()  argparse: names, types, choices and help of a command
      |-> find()                 the value for a call: node config, code, environment; with its source
      |-> environment()          what a command passes on to the processes that it starts
      '-> docs/reference         tests hold the pages to the table

Values are refused with what they must be, and with where they come from: a variable, an option, a keyword, or
a key of the node config.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypedDict, get_args

from flower_gpu.kinds import (
    COUNT,
    CPUS,
    FOLDER,
    GPU_IDS,
    GPUS,
    SECONDS,
    SECONDS_OR_0,
    SIZE,
    SWITCH,
    Option,
    flag,
    several,
    table_of,
    words,
)

if TYPE_CHECKING:
    import argparse

# The words are types, so that mypy and pyright find wrong ones in users' code.
#: How a worker can be started; docs/explanation/isolation.md has their costs and guarantees.
StartMethodWord = Literal["auto", "forkserver", "spawn", "fork", "in-process"]
#: What a node can say; docs/explanation/device-policy.md has the table.
PolicyWord = Literal["never", "offer", "force", "require"]
_POLICY_MEANINGS: Final = (
    "no GPU",
    "a GPU if the run wants one",
    "a GPU, else the CPU, whatever the run wants",
    "a GPU, else an error, whatever the run wants",
)
#: What can follow when a call runs out of GPU memory. ``retry``: it runs again with more of a GPU, at last
#: alone on one, and then fails. ``cpu``: and then it runs on the CPU. ``fail``: it fails at once.
OnOomWord = Literal["retry", "cpu", "fail"]
START_METHODS: Final[tuple[str, ...]] = get_args(StartMethodWord)
POLICIES: Final[tuple[str, ...]] = get_args(PolicyWord)
ON_OOM: Final[tuple[str, ...]] = get_args(OnOomWord)
#: How leases are placed. ``spread``: on the GPU with the most room. ``pack``: on the one with the least that
#: is enough, which leaves others free for large requests.
PLACEMENTS: Final = ("spread", "pack")

_LEASE_TIMEOUT_S: Final = 1800.0  # on a GPU: half of what Flower gives a round

_NOTHING: Mapping[str, Any] = MappingProxyType({})


_EVERYWHERE: Final = ("launch", "simulate", "supernode")


class CallOptions(TypedDict, total=False):
    """Options of calls: of clients, of the server's evaluation, of a simulation, of a function.

    ``GPUClient``, ``gpu_client``, ``gpu_mod``, ``gpu_evaluate``, ``simulate``, ``run_in_worker`` take them.
    What is left out is taken from the environment (docs/reference/environment.md), else the default.

    Parameters
    ----------
    start_method : str
        One of :data:`START_METHODS`; default ``"auto"``. ``"in-process"`` runs everything in the calling
        process, for debugging with breakpoints.
    timeout_s : float
        Seconds a call may take, counted from its lease; then its worker and the worker's children are ended.
        Default: no limit.
    env : mapping of str to str
        Environment variables of the worker.
    name : str
        The client's name in messages and in the trace.
    preload : str, tuple or list
        What all workers need and takes long to load: ``"package.module:function"``, a pair of that and its
        keyword arguments, or a list of these. The function is called once where workers are forked from, on
        the CPU; what it leaves in the globals of its module is there in every worker, without a copy.
    num_gpus : float
        How many GPUs a call gets: a share of one (0.25: four calls fit), or a whole number.
    gpu_memory : int or str
        Memory of one GPU that a call gets, CUDA's context included: ``"2GiB"``, or bytes. Default, if
        ``num_gpus`` is not given either: what earlier calls of the task were seen to need.
    num_cpus : float
        How many cores a call gets, also a part of one (0.5); its libraries have as many threads, at least
        one. Default on the CPU: an equal share of the cores where it is known how many calls may run at a
        time, else all that are free. Default on a GPU: none are counted.
    lease_timeout_s : float
        Seconds a call may wait for its lease; default 1800 on a GPU, half of what Flower gives a round, and
        no limit on the CPU.
    on_oom : str
        What follows when a call runs out of GPU memory: ``"retry"`` (default) with more of a GPU, ``"cpu"``
        if that fails too, or ``"fail"``.
    gpu : str
        This node's device policy where neither the node config nor the environment has one: ``"never"``,
        ``"offer"`` (default), ``"force"`` or ``"require"``.
    gpu_ids : int or str
        This node's GPUs likewise: a number, a UUID, or several of them in one text, ``"0,1"``.
    context : flwr.app.Context
        What ``client_fn`` or ``server_fn`` gets: its node config may hold ``gpu``, ``gpu-ids``,
        ``num-gpus``, ``gpu-memory`` and ``num-cpus``, its run config ``use-gpu``.
    """

    start_method: Annotated[
        StartMethodWord | None,
        Option(
            "how worker processes are started (default: auto)",
            words(*START_METHODS),
            "FLOWER_GPU_START_METHOD",
            "auto",
            "workers",
            ("launch",),
        ),
    ]
    timeout_s: Annotated[
        float | None,
        Option(
            "seconds a call in a worker may take, counted from its lease (default: no limit)",
            SECONDS,
            "FLOWER_GPU_TIMEOUT_S",
            None,
            "workers",
            _EVERYWHERE,
        ),
    ]
    env: Annotated[Mapping[str, str] | None, Option("environment variables of the worker")]
    name: Annotated[
        str | None,
        Option("name of this process's client in the trace and in log lines", None, "FLOWER_GPU_CLIENT"),
    ]
    preload: Annotated[Any, Option("functions that load data once for all workers")]
    gpu: Annotated[
        PolicyWord | None,
        Option(
            "device policy of a node: never, offer, force or require a GPU (default: offer)",
            words(*POLICIES, meanings=_POLICY_MEANINGS),
            "FLOWER_GPU_POLICY",
            "offer",
            "GPUs",
            _EVERYWHERE,
            "gpu",
            is_nodes=True,
        ),
    ]
    gpu_ids: Annotated[
        int | str | None,
        Option(
            "GPU numbers or UUIDs of a node, such as 0,1",
            GPU_IDS,
            "FLOWER_GPU_IDS",
            None,
            "GPUs",
            _EVERYWHERE,
            "gpu-ids",
            is_nodes=True,
        ),
    ]
    num_gpus: Annotated[
        float | None,
        Option(
            "GPUs of a call: a share of one, such as 0.25, or 1, 2, ... (default: what the task was seen to "
            "need)",
            GPUS,
            "FLOWER_GPU_NUM_GPUS",
            None,
            "GPUs",
            _EVERYWHERE,
            "num-gpus",
            excludes="amount",
        ),
    ]
    gpu_memory: Annotated[
        int | str | None,
        Option(
            "GPU memory of a call, such as 2GiB, CUDA's own included",
            SIZE,
            "FLOWER_GPU_MEMORY",
            None,
            "GPUs",
            _EVERYWHERE,
            "gpu-memory",
            excludes="amount",
        ),
    ]
    num_cpus: Annotated[
        float | None,
        Option(
            "cores of a call, such as 0.5 or 2; it waits until they are free (default: on the CPU the cores "
            "divided by what may run at a time, on a GPU none)",
            CPUS,
            "FLOWER_GPU_NUM_CPUS",
            None,
            "workers",
            _EVERYWHERE,
            "num-cpus",
        ),
    ]
    lease_timeout_s: Annotated[
        float | None,
        Option(
            f"seconds a call may wait for its lease (default: {_LEASE_TIMEOUT_S:g} for a GPU, no limit for "
            "cores)",
            SECONDS,
            "FLOWER_GPU_LEASE_TIMEOUT_S",
            _LEASE_TIMEOUT_S,
            "GPUs",
            _EVERYWHERE,
        ),
    ]
    on_oom: Annotated[
        OnOomWord | None,
        Option(
            "a call that runs out of GPU memory: retry with more of it, then fail; the same, but at last on "
            "the cpu; fail at once (default: retry)",
            words(*ON_OOM),
            "FLOWER_GPU_ON_OOM",
            "retry",
            "GPUs",
            _EVERYWHERE,
        ),
    ]
    context: Annotated[Any, Option("Flower's Context, with node config and run config")]


#: Options of several commands that are not about one call.
KEEP_GOING: Final = Option(
    "go on when every client failed in the first round, or in three rounds in a row (default: such a run "
    "ends with status 1)",
    SWITCH,
    group="workers",
)
LOG_DIR: Final = Option("where the run's folder is made (default: runs)", FOLDER, group="output")
#: Where the figures of a run can be sent. Each is an extra of the package, too.
TRACKERS: Final = ("tensorboard", "wandb", "mlflow")
TRACKER: Final = Option(
    "send metrics, durations, GPU memory and failures there while the run goes on; several with commas, or "
    "repeated",
    several(*TRACKERS),
    group="output",
)


#: The options of a call, by their keywords.
CALL: Final = MappingProxyType(table_of(CallOptions))

RUN_DIR_VARIABLE: Final = "FLOWER_GPU_RUN_DIR"
START_METHOD_VARIABLE: Final = "FLOWER_GPU_START_METHOD"
CLIENT_VARIABLE: Final = "FLOWER_GPU_CLIENT"
CONCURRENCY_VARIABLE: Final = "FLOWER_GPU_CONCURRENCY"
NUM_CPUS_VARIABLE: Final = "FLOWER_GPU_NUM_CPUS"
CPU_LEASES_VARIABLE: Final = "FLOWER_GPU_CPU_LEASES"
HOST_RESERVE_VARIABLE: Final = "FLOWER_GPU_HOST_RESERVE"
POLL_VARIABLE: Final = "FLOWER_GPU_POLL_S"
IDLE_POLL_VARIABLE: Final = "FLOWER_GPU_IDLE_POLL_S"
GUARD_VARIABLE: Final = "FLOWER_GPU_GUARD"

#: Of commands whose workers import no code of an app before the kernel keeps them from other GPUs.
GPU_GUARD: Final = Option(
    "have the kernel keep workers from all GPUs but those of their lease (default: on, where it can)",
    words("on", "off", "require"),
    GUARD_VARIABLE,
    "on",
    "GPUs",
)

#: Every environment variable that users set.
VARIABLES: Final[Mapping[str, Option]] = MappingProxyType(
    {
        **{option.variable: option for option in CALL.values() if option.variable},
        RUN_DIR_VARIABLE: Option("folder of the run: events are appended to trace.jsonl in it"),
        "FLOWER_GPU_STATE_DIR": Option(
            "folder for flower-gpu-<uid>: what this user's processes share on this host", default="/tmp"
        ),
        "FLOWER_GPU_LEDGER_DIR": Option("folder that the ledger's users share", default="/tmp"),
        "FLOWER_GPU_SERVER_IDLE_S": Option(
            "seconds after which an unused fork server ends", SECONDS_OR_0, default=300.0
        ),
        CONCURRENCY_VARIABLE: Option(
            "how many workers may run at the same time; they share the cores", COUNT, default=1
        ),
        CPU_LEASES_VARIABLE: Option(
            "whether calls get cores and main memory from the ledger", words("on", "off"), default="on"
        ),
        HOST_RESERVE_VARIABLE: Option(
            "main memory of the host that is never leased; the default is 5 % of it", SIZE
        ),
        "FLOWER_GPU_PLACEMENT": Option(
            "whether leases spread over the GPUs or pack them", words(*PLACEMENTS), default="spread"
        ),
        "FLOWER_GPU_RESERVE": Option("memory of each GPU that is never leased", SIZE, default="256MiB"),
        POLL_VARIABLE: Option(
            "least seconds between a SuperNode's questions to its SuperLink", SECONDS, default=0.5
        ),
        GUARD_VARIABLE: GPU_GUARD,
        IDLE_POLL_VARIABLE: Option(
            "seconds between these questions when nothing came for a minute", SECONDS, default=30.0
        ),
    }
)

RANKS_VARIABLE: Final = "FLOWER_GPU_RANKS"
DEVICES_VARIABLE: Final = "FLOWER_GPU_DEVICES"
GUARDED_VARIABLE: Final = "FLOWER_GPU_GUARDED"
CONFINE_VARIABLE: Final = "FLOWER_GPU_CONFINE"
CONFINED_VARIABLE: Final = "FLOWER_GPU_CONFINED"
DEADLINE_VARIABLE: Final = "FLOWER_GPU_DEADLINE"
#: Variables that only our own processes set for each other.
INTERNAL_VARIABLES: Final = MappingProxyType(
    {
        "FLOWER_GPU_SUPERNODE": "Set in SuperNodes: lease, or start where apps take leases themselves.",
        "FLOWER_GPU_SLOTS": "Set in SuperNodes: folder of the locks by which messages wait for each other.",
        "FLOWER_GPU_PROGRAMS": "Set for what forks programs of Flower: a descriptor of its connection.",
        "FLOWER_GPU_WAKEUP": "Set for a SuperExec: the socket by which its parent wakes it.",
        "FLOWER_GPU_GROUP": "Set in SuperNodes and a ServerApp: the sockets by which they wake each other.",
        "FLOWER_GPU_LEASE": "Set in workers: the lease they hold.",
        DEVICES_VARIABLE: "Set in workers: the device files of GPUs that they may open.",
        CONFINE_VARIABLE: "Set in SuperNodes with --confine: what apps may have, as JSON.",
        CONFINED_VARIABLE: "Set in confined workers: what they may have, as JSON.",
        GUARDED_VARIABLE: "Set by tests: files that are taken for those of GPUs, too.",
        RANKS_VARIABLE: "Set in workers of calls for several GPUs: how many ranks run without a lease.",
        DEADLINE_VARIABLE: "Set in workers of calls for several GPUs: their end, by time.monotonic().",
    }
)

#: Variables that only files of a clone read, not the package.
SCRIPT_VARIABLES: Final = MappingProxyType(
    {
        "FLOWER_GPU_VENV": "run.sh, tests/run.sh: a virtual environment that is used as it is",
        "FLOWER_GPU_APP": "run.sh: the app that runs if no other is named",
        "FLOWER_GPU_REPOSITORY": "python -m build, scripts/site.sh: the address of the repository",
        "FLOWER_GPU_SITE_URL": "scripts/site.sh: the address of the site",
    }
)


def value_of(variable: str, environ: Mapping[str, str]) -> Any:
    """Return the value of an environment variable of :data:`VARIABLES`; its default where it is not set.

    Raises
    ------
    ConfigError
        If it cannot be used.
    """
    option = VARIABLES[variable]
    text = environ.get(variable)
    if not text:
        return option.default
    return option.kind.from_text(text, variable) if option.kind else text


def find(
    names: Collection[str],
    code: Mapping[str, Any],
    environ: Mapping[str, str],
    node_config: Mapping[str, Any] = _NOTHING,
) -> dict[str, tuple[Any, str]]:
    """Return the values of call options in the first place that has any of them, each with its source.

    The places are the node config, the code and the environment; for what a node decides, the environment
    goes before the code. A value that another place hides is not looked at.
    """
    table = {name: CALL[name] for name in names}
    found: dict[str, tuple[Any, str]] = {}
    for name, option in table.items():
        if option.node_key and node_config.get(option.node_key) is not None:
            found[name] = node_config[option.node_key], f"{option.node_key} in the node config"
    in_code = {name: (code[name], name) for name in names if code.get(name) is not None}
    if found or (in_code and not all(option.is_nodes for option in table.values())):
        return found or in_code
    in_environment = {
        name: (value_of(option.variable, environ), option.variable)
        for name, option in table.items()
        if option.variable and environ.get(option.variable)
    }
    return in_environment or in_code


def checked_value(name: str, code: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    """Return the value of a call option that its kind alone can check; its default where no place has it."""
    option = CALL[name]
    found = find([name], code, environ)
    if not found:
        return option.default
    value, source = found[name]
    return option.kind.check(value, source) if option.kind else value


def options_of(command: str) -> dict[str, Option]:
    """Return the call options that a command has."""
    return {name: option for name, option in CALL.items() if command in option.commands}


def given(arguments: argparse.Namespace) -> CallOptions:
    """Return the call options of a command line."""
    found = {name: getattr(arguments, name, None) for name, option in CALL.items() if option.commands}
    return {name: value for name, value in found.items() if value is not None}  # type: ignore[return-value]


def environment(options: Mapping[str, Any], base: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with these call options in it: they win over the variables that are there."""
    # A share and a size are two ways to say one thing: whichever is given takes the other's place.
    replaced = {CALL[name].excludes for name in options} - {""}
    left_out = {option.variable for option in CALL.values() if option.excludes in replaced}
    said = {variable: str(value) for name, value in options.items() if (variable := CALL[name].variable)}
    return {**{name: value for name, value in base.items() if name not in left_out}, **said}


def node_environment(env: Mapping[str, str], node_config: Mapping[str, Any]) -> dict[str, str]:
    """Return a client's environment: its node config holds also for code that passes no context on."""
    found = {name: find([name], {}, {}, node_config) for name, option in CALL.items() if option.is_nodes}
    return environment({name: each[name][0] for name, each in found.items() if each}, env)


def name_of(variable: str, options: Mapping[str, Any]) -> str:
    """Return what the user has to change where a variable's value is wrong: it, or the option that set it."""
    return next((flag(name) for name in options if CALL[name].variable == variable), variable)


def in_their_words(text: str, options: Mapping[str, Any]) -> str:
    """Return a message about variables with the options in their place that were given."""
    return re.sub(r"FLOWER_GPU_[A-Z_]+", lambda found: name_of(found[0], options), text)
