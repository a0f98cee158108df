"""The table of all options, and how their values are resolved.

    CallOptions, SimulationOptions, LaunchOptions, VARIABLES   one line for each option
      |-> Option.resolve()            the value, from the first source that sets it
      |-> resolve_all()               the values of the options of a call, for calls/settings.py
      |-> environment()               the environment of the processes that a command starts
      |-> cli.arguments.add_options() argparse: names, types, choices and help of a command
      '-> docs/reference              tests compare the pages with the table

The sources are a config, the code or the command line, and the environment. docs/reference/environment.md has
their order.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypedDict, get_args, get_type_hints

from flower_gpu.errors import ConfigError
from flower_gpu.kinds import (
    COUNT,
    CPUS,
    FOLDER,
    GPU_IDS,
    GPU_SIZE,
    GPUS,
    SECONDS,
    SECONDS_OR_0,
    SHARE,
    SIZE_OR_0,
    SWITCH,
    TRUE_OR_FALSE,
    Kind,
    several,
    words,
)

_FLAG: Final = re.compile(r"--([a-z][a-z-]*)")
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class GivenValue:
    """The value of an option in one source."""

    value: Any
    kind: Kind | None
    place: int  # precedence of the source, 0 for the highest
    source: str  # name of the source in messages
    is_variable: bool = False
    is_config: bool = False

    def read(self) -> Any:
        """Return the parsed value.

        Raises TypeError if code passes a value of a wrong type, and ConfigError if the value is invalid.
        """
        if self.kind is None:
            return self.value
        if self.is_variable:
            return self.kind.from_text(self.value, self.source)
        try:
            return self.kind.check(self.value, self.source)
        except TypeError as error:
            if self.is_config:
                raise ConfigError(str(error)) from None
            raise

    def __str__(self) -> str:
        if self.is_variable:
            return f"{self.source}={self.value}"
        shown = f"{self.value:g}" if isinstance(self.value, float) else self.value
        is_flag = self.source.startswith("--") and not self.is_config
        return f"{self.source} {shown}" if is_flag else f"{self.source}={self.value!r}"


@dataclass(frozen=True)
class Option:
    """One option."""

    help: str
    kind: Kind | None = None  # None for values that are checked by their users
    variable: str = ""  # environment variable
    default: Any = None  # a text is parsed like a text of a user
    group: str = ""  # heading in --help
    commands: tuple[str, ...] = ()  # commands with this option
    node_key: str = ""  # key of a SuperNode's --node-config
    is_nodes: bool = False  # the node has the last word: the variable takes precedence over the code
    alone: str = ""  # value of the option on a command line without a value
    synonyms: tuple[str, ...] = ()  # other names of the option, listed in --help
    excludes: str = ""  # name of the option that sets the same in another way
    run_config_key: str = ""  # key of the app's run config that the option sets
    hint: str = ""  # for the author of an app that does not declare the key
    name: str = ""  # name in code
    in_code: str = ""  # help for the option in code, if that differs

    def resolve(
        self,
        argument: Any = None,
        environment: Mapping[str, str] = _NOTHING,
        config: Mapping[str, Any] = _NOTHING,
    ) -> Any:
        """Return the value of the first source that sets the option, or the default.

        ``argument``: value from code or a command line, or None.
        ``environment``: environment variables. An empty variable counts as not set.
        ``config``: the node config, or the run config for an option with a key of the run config.
        Raises the errors of :meth:`GivenValue.read`. Values of later sources are not checked.
        """
        given_value = self.find(argument, environment, config)
        return given_value.read() if given_value is not None else self.default_value

    def find(
        self,
        argument: Any,
        environment: Mapping[str, str],
        config: Mapping[str, Any] = _NOTHING,
        named: Callable[[str], str] = str,
    ) -> GivenValue | None:
        """Return the value of the first source that sets the option, or None.

        ``named``: returns the name of an argument for messages.
        """
        key = self.node_key or self.run_config_key
        if key and config.get(key) is not None:
            of_run = f"{key} in the config of the call or the run"
            source = f"--node-config {key}" if self.node_key else of_run
            return GivenValue(config[key], self.kind, 0, source, is_config=True)
        text = environment.get(self.variable)
        if text and (self.is_nodes or argument is None):
            return GivenValue(text, self.kind, 1 if self.is_nodes else 3, self.variable, is_variable=True)
        return None if argument is None else GivenValue(argument, self.kind, 2, named(self.name))

    @property
    def default_value(self) -> Any:
        """The parsed default."""
        is_text = self.kind is not None and isinstance(self.default, str)
        return self.kind.from_text(self.default, self.name) if is_text else self.default  # type: ignore[union-attr]

    @property
    def described(self) -> str:
        """The help text with the default."""
        return self._with_default(self.help)

    @property
    def described_in_code(self) -> str:
        """The same for the option in code. It names other options as in code, too."""
        return self._with_default(
            self.in_code or _FLAG.sub(lambda match: match[1].replace("-", "_"), self.help)
        )

    def _with_default(self, text: str) -> str:
        default = f"{self.default:g}" if isinstance(self.default, float) else self.default
        return text.replace("{default}", str(default))


def table_of(annotated: type) -> dict[str, Option]:
    """Return the options in the annotations of a class, with their defaults, by field."""
    return {
        name: replace(meta, name=name, default=vars(annotated).get(name, meta.default))
        for name, hint in get_type_hints(annotated, include_extras=True).items()
        for meta in getattr(hint, "__metadata__", ())
        if isinstance(meta, Option)
    }


def documented(doc: str | None, heading: str, table: Mapping[str, Option]) -> str:
    """Return a docstring in the style of NumPy with a section about these options at its end."""
    lines = [f"{name}\n    {option.described_in_code}" for name, option in table.items()]
    return "\n".join([inspect.cleandoc(doc or ""), f"\n{heading}\n{'-' * len(heading)}", *lines])


def flag(name: str) -> str:
    """Return the name of an option on a command line, such as ``--gpu-memory``."""
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"


# The words are types, so that mypy and pyright find invalid words in users' code.
#: How a worker can be started; docs/explanation/isolation.md has their costs and guarantees.
StartMethodWord = Literal["auto", "forkserver", "spawn", "fork", "in-process"]
#: The policies of a node; docs/explanation/device-policy.md has the table.
PolicyWord = Literal["never", "offer", "force", "require"]
_POLICY_MEANINGS: Final = (
    "no GPU",
    "a GPU if the run requests one",
    "a GPU, else the CPU, whatever the run requests",
    "a GPU, else an error, whatever the run requests",
)
#: What can follow when a call runs out of GPU memory. ``retry``: it runs again with more of a GPU, at last
#: alone on one, and then fails. ``cpu``: and then it runs on the CPU. ``fail``: it fails at once.
OnOomWord = Literal["retry", "cpu", "fail"]
START_METHODS: Final[tuple[str, ...]] = get_args(StartMethodWord)
POLICIES: Final[tuple[str, ...]] = get_args(PolicyWord)
ON_OOM: Final[tuple[str, ...]] = get_args(OnOomWord)

_EVERYWHERE: Final = ("launch", "simulate", "supernode")
_worker_option: Final = partial(Option, group="workers", commands=_EVERYWHERE)
_gpu_option: Final = partial(Option, group="GPUs", commands=_EVERYWHERE)


class CallOptions(TypedDict, total=False):
    """Options of calls: of clients, of the server's evaluation, of a simulation, of a function.

    ``GPUClient``, ``gpu_client``, ``gpu_mod``, ``gpu_evaluate``, ``simulate`` and ``run_in_worker`` accept
    them. An option that is not passed comes from the environment (docs/reference/environment.md), or is the
    default. docs/reference/python.md describes each option.
    """

    start_method: Annotated[
        StartMethodWord | None,
        _worker_option(
            "how worker processes are started (default: {default})",
            words(*START_METHODS),
            "FLOWER_GPU_START_METHOD",
            "auto",
            commands=("launch",),
        ),
    ]
    timeout_s: Annotated[
        float | None,
        _worker_option(
            "seconds a call in a worker may take, counted from its lease (default: no limit)",
            SECONDS,
            "FLOWER_GPU_TIMEOUT_S",
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
        _gpu_option(
            "device policy of a node: never, offer, force or require a GPU (default: {default})",
            words(*POLICIES, meanings=_POLICY_MEANINGS),
            "FLOWER_GPU_POLICY",
            "offer",
            node_key="gpu",
            is_nodes=True,
        ),
    ]
    gpu_ids: Annotated[
        int | str | None,
        _gpu_option(
            "GPU numbers or UUIDs of a node, such as 0,1",
            GPU_IDS,
            "FLOWER_GPU_IDS",
            node_key="gpu-ids",
            is_nodes=True,
        ),
    ]
    num_gpus: Annotated[
        float | None,
        _gpu_option(
            "GPUs of a call: a share of one, such as 0.25, or 1, 2, ... (default: the measured need of the "
            "task)",
            GPUS,
            "FLOWER_GPU_NUM_GPUS",
            node_key="num-gpus",
            excludes="gpu_memory",
        ),
    ]
    gpu_memory: Annotated[
        int | str | None,
        _gpu_option(
            "GPU memory of a call, such as 2GiB, CUDA's own included",
            GPU_SIZE,
            "FLOWER_GPU_MEMORY",
            node_key="gpu-memory",
            excludes="num_gpus",
        ),
    ]
    gpu_compute: Annotated[
        float | None,
        _gpu_option(
            "share of a GPU's processors that a call has under simulate --mps (default: its share of the "
            "memory)",
            SHARE,
            "FLOWER_GPU_COMPUTE",
            commands=("simulate",),
            in_code="share of a GPU's processors that a call has under simulate(mps=True) (default: its "
            "share of the memory)",
        ),
    ]
    num_cpus: Annotated[
        float | None,
        _worker_option(
            "cores of a call, such as 0.5 or 2; it waits until they are free (default: on the CPU an equal "
            "part of the cores, on a GPU none)",
            CPUS,
            "FLOWER_GPU_NUM_CPUS",
            node_key="num-cpus",
        ),
    ]
    lease_timeout_s: Annotated[
        float | None,
        _gpu_option(
            "seconds a call may wait for its lease (default: {default} for a GPU, no limit for cores)",
            SECONDS,
            "FLOWER_GPU_LEASE_TIMEOUT_S",
            1800.0,  # half of what Flower gives a round
        ),
    ]
    on_oom: Annotated[
        OnOomWord | None,
        _gpu_option(
            "after a call ran out of GPU memory: retry with more of it, and finally fail; the same, but "
            "finally run on the cpu; fail at once (default: {default})",
            words(*ON_OOM),
            "FLOWER_GPU_ON_OOM",
            "retry",
        ),
    ]
    context: Annotated[Any, Option("Flower's Context, with node config and run config")]


#: Options of several commands that are not about one call.
KEEP_GOING: Final = Option(
    "continue when every client failed in the first round, or in three rounds in a row (default: such a run "
    "ends with status 1)",
    SWITCH,
    group="workers",
    in_code="continue even if every client failed in the first round or in three rounds in a row",
)
LOG_DIR: Final = Option(
    "where the run's folder is made (default: {default})", FOLDER, default="runs", group="output"
)
RESUME: Final = Option(
    "folder of an earlier run of the same app: continue after the last round that it finished",
    FOLDER,
    group="output",
    excludes="log_dir",
)
#: Where the figures of a run can be sent. Each is an extra of the package, too.
TRACKERS: Final = ("tensorboard", "wandb", "mlflow")
TRACKER: Final = Option(
    "send metrics, durations, GPU memory and failures there during the run; several with commas, or repeated",
    several(*TRACKERS),
    group="output",
)


#: The options of a call, by their keywords.
CALL: Final = MappingProxyType(table_of(CallOptions))
CallOptions.__doc__ = documented(CallOptions.__doc__, "Parameters", CALL)

RUN_DIR_VARIABLE: Final = "FLOWER_GPU_RUN_DIR"
_RUN_DIR: Final = Option(
    "folder of the run: events are appended to trace.jsonl in it", variable=RUN_DIR_VARIABLE
)
CLIENT_VARIABLE: Final = "FLOWER_GPU_CLIENT"

#: Whether the server wants a GPU: a key of the config of a call, and of the run config.
USE_GPU: Final = Option(
    "whether the run requests GPUs; nodes decide, see --gpu", TRUE_OR_FALSE, run_config_key="use-gpu"
)

#: Of commands whose workers import no code of an app before the kernel keeps them from other GPUs.
GPU_GUARD: Final = _gpu_option(
    "have the kernel keep workers from all GPUs but those of their lease (default: {default}, if possible)",
    words("on", "off", "require"),
    "FLOWER_GPU_GUARD",
    "on",
    name="gpu_guard",
)

#: Of the same commands. The framework's own cap always holds: it fails earlier, and says more.
GPU_CAP: Final = _gpu_option(
    "what limits workers to the GPU memory of a lease: the driver if possible (auto), the driver or else no "
    "call is run (driver), or only the allocators of frameworks (default: {default})",
    words("auto", "allocator", "driver"),
    "FLOWER_GPU_CAP",
    "auto",
    name="gpu_cap",
)

#: The options that limit workers.
LIMITS: Final = {"gpu_guard": GPU_GUARD, "gpu_cap": GPU_CAP}

STATE_DIR: Final = Option(
    "folder for flower-gpu-<uid>, which this user's processes share on this host",
    variable="FLOWER_GPU_STATE_DIR",
    default="/tmp",
)
LEDGER_DIR: Final = Option(
    "folder that the ledger's users share", variable="FLOWER_GPU_LEDGER_DIR", default="/tmp"
)
ENVIRONMENTS_DIR: Final = Option(
    "folder for the packages that apps declare; the default is flower-gpu-envs in FLWR_HOME",
    variable="FLOWER_GPU_ENVIRONMENTS_DIR",
)
SERVER_IDLE: Final = Option(
    "seconds after which an unused fork server ends", SECONDS_OR_0, "FLOWER_GPU_SERVER_IDLE_S", 300.0
)
SAY_WAIT: Final = Option(
    "seconds after which a caller logs what it waits for", SECONDS_OR_0, "FLOWER_GPU_SAY_WAIT_S", 5.0
)
CONCURRENCY: Final = Option(
    "number of workers that may run at the same time; they share the cores",
    COUNT,
    "FLOWER_GPU_CONCURRENCY",
    1,
)
CPU_LEASES: Final = Option(
    "whether calls get cores and main memory from the ledger",
    words("on", "off"),
    "FLOWER_GPU_CPU_LEASES",
    "on",
)
HOST_RESERVE: Final = Option(
    "main memory of the host that is never leased; the default is 5 % of it",
    SIZE_OR_0,
    "FLOWER_GPU_HOST_RESERVE",
)
#: ``spread``: on the GPU with the most room. ``pack``: on the one with the least that is enough, which leaves
#: others free for large requests.
PLACEMENT: Final = Option(
    "whether leases spread over the GPUs or pack them",
    words("spread", "pack"),
    "FLOWER_GPU_PLACEMENT",
    "spread",
)
RESERVE: Final = Option("memory of each GPU that is never leased", SIZE_OR_0, "FLOWER_GPU_RESERVE", "256MiB")
POLL: Final = Option(
    "minimum seconds between a SuperNode's requests to its SuperLink", SECONDS, "FLOWER_GPU_POLL_S", 0.5
)
IDLE_POLL: Final = Option(
    "seconds between these requests after a minute without messages", SECONDS, "FLOWER_GPU_IDLE_POLL_S", 30.0
)

#: Every environment variable that users set: those of the options that are defined above.
VARIABLES: Final[Mapping[str, Option]] = MappingProxyType(
    {
        option.variable: option
        for option in (*CALL.values(), *globals().values())
        if isinstance(option, Option) and option.variable
    }
)

RANKS_VARIABLE: Final = "FLOWER_GPU_RANKS"
DEVICES_VARIABLE: Final = "FLOWER_GPU_DEVICES"
GUARDED_VARIABLE: Final = "FLOWER_GPU_GUARDED"
CONFINE_VARIABLE: Final = "FLOWER_GPU_CONFINE"
CONFINED_VARIABLE: Final = "FLOWER_GPU_CONFINED"
DEADLINE_VARIABLE: Final = "FLOWER_GPU_DEADLINE"
MPS_VARIABLE: Final = "FLOWER_GPU_MPS_SMS"
#: Variables that only our own processes set for each other.
INTERNAL_VARIABLES: Final = MappingProxyType(
    {
        "FLOWER_GPU_SUPERNODE": "Set in SuperNodes: lease, or start where apps take leases themselves.",
        "FLOWER_GPU_PROGRAMS": "Set for the process that forks Flower's programs: its connection.",
        "FLOWER_GPU_WAKEUP": "Set for a SuperExec: the socket by which its parent wakes it.",
        "FLOWER_GPU_GROUP": "Set in SuperNodes and a ServerApp: the sockets by which they wake each other.",
        "FLOWER_GPU_LEASE": "Set in workers: the lease they hold.",
        DEVICES_VARIABLE: "Set in workers: the device files of GPUs that they may open.",
        CONFINE_VARIABLE: "Set in SuperNodes with --confine: what apps may access, as JSON.",
        CONFINED_VARIABLE: "Set in confined workers: what they may access, as JSON.",
        GUARDED_VARIABLE: "Set by tests: further files that count as device files of GPUs.",
        RANKS_VARIABLE: "Set in workers of calls for several GPUs: how many ranks run without a lease.",
        MPS_VARIABLE: "Set in runs with MPS: how many processors each card has, as JSON.",
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


def resolve_all(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
    node_config: Mapping[str, Any] = _NOTHING,
    named: Callable[[str], str] = str,
) -> tuple[dict[str, Any], dict[str, GivenValue]]:
    """Return the values of all options of a call, and the sources of those that are set.

    Of two options that exclude each other, the one with the higher precedence is kept.
    Raises ConfigError if one source sets both, and the errors of :meth:`GivenValue.read`.
    """
    values = (
        (name, option.find(arguments.get(name), environment, node_config, named))
        for name, option in CALL.items()
    )
    set_values = {name: value for name, value in values if value is not None}
    for name in tuple(set_values):
        value, excluded = set_values.get(name), set_values.get(CALL[name].excludes)
        if value is None or excluded is None:
            continue
        if value.place == excluded.place:
            raise ConfigError(
                f"{value} and {excluded} are both given; give one: a share of the GPU, or a size"
            )
        set_values.pop(name if excluded.place < value.place else CALL[name].excludes)
    return {
        name: set_values[name].read() if name in set_values else option.default_value
        for name, option in CALL.items()
    }, set_values


def joined(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of several sources in one mapping. Later sources take precedence."""
    options: dict[str, Any] = {}
    for layer in layers:
        # A share and a size set the same thing, so each of them replaces the other.
        for name in layer:
            if name in CALL:
                options.pop(CALL[name].excludes, None)
        options.update(layer)
    return options


def options_of(command: str) -> dict[str, Option]:
    """Return the call options of a command."""
    return {name: option for name, option in CALL.items() if command in option.commands}


def environment(options: Mapping[str, Any], base: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with these call options. They take precedence over the variables in ``base``."""
    # A share and a size set the same thing, so each of them replaces the other.
    replaced = {CALL[CALL[name].excludes].variable for name in options if CALL[name].excludes}
    added = {variable: str(value) for name, value in options.items() if (variable := CALL[name].variable)}
    return {**{name: value for name, value in base.items() if name not in replaced}, **added}


def node_environment(env: Mapping[str, str], node_config: Mapping[str, Any]) -> dict[str, str]:
    """Return a client's environment with its node config, for code that does not pass the context on."""
    return environment(
        {
            name: node_config[option.node_key]
            for name, option in CALL.items()
            if option.is_nodes and node_config.get(option.node_key) is not None
        },
        env,
    )
