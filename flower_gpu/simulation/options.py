"""The options of a simulation: one line of :class:`SimulationOptions` for each.

    simulation.run.simulate()    its type hints and its help
    simulation.plan.RunPlan      the checked values
    cli/simulate.py              flags and help, for options with a kind

The options of its calls are in :mod:`flower_gpu.options`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, get_args

from flower_gpu.apps.app import NUM_ROUNDS_KEY
from flower_gpu.kinds import COUNT, NON_NEGATIVE, SIZE, SWITCH, TEXT, words
from flower_gpu.options import CALL, KEEP_GOING, LOG_DIR, RESUME, CallOptions, Option, documented, table_of

#: Order of the messages of a round: the longest ones first, or the order in which they are sent.
OrderWord = Literal["longest", "sent"]

#: Which lines of clients are shown: the first lines of each round, all lines, or none (they are only in the
#: file).
ClientOutputWord = Literal["auto", "all", "file"]

#: Number of lines of clients that ``auto`` shows in each round.
LINES_PER_ROUND: Final = 20

_federation: Final = partial(Option, group="federation")
_workers: Final = partial(Option, group="workers")
_output: Final = partial(Option, group="output")

#: Number of virtual clients. It has no default, so it is a parameter of its own.
NUM_SUPERNODES: Final = _federation(
    "number of virtual clients (default with --resume: the earlier number)",
    COUNT,
    synonyms=("clients",),
    name="num_supernodes",
)


class SimulationOptions(CallOptions, total=False):
    """Options of :func:`flower_gpu.simulate`, besides those of its calls in :class:`CallOptions`.

    An option that is None or not passed has its default, except that ``log_dir=None`` means no folder.
    """

    rounds: Annotated[int | None, _federation("number of rounds", COUNT, run_config_key=NUM_ROUNDS_KEY)]
    run_config: Annotated[Mapping[str, Any] | None, Option("values that override the app's run config")]
    seed: Annotated[
        int | None,
        _federation(
            "seed of the node ids and of all random numbers, those of the ServerApp too: the same "
            "initial model, the same sampled clients (default: drawn, and written down)",
            NON_NEGATIVE,
        ),
    ]
    deterministic: Annotated[
        bool,
        _federation(
            "the same seed gives the same final model, bit for bit, with any number of workers, "
            "after crashes and --resume; anything that would change it ends the run",
            SWITCH,
            default=False,
        ),
    ]
    clients: Annotated[
        Mapping[Any, Mapping[str, Any]] | None,
        Option(
            'settings of single clients, by partition: 7, "0-9", "*" or "*/4"; each is a mapping with the '
            'keys of a table of clients, such as {"slow-down": 4}'
        ),
    ]
    max_workers: Annotated[
        int | None,
        _workers(
            "maximum number of messages handled at a time (default: the number of cores, or the "
            "shares of GPUs if these are more)",
            COUNT,
        ),
    ]
    calls_per_worker: Annotated[
        int | None,
        _workers(
            "maximum number of messages that one worker handles; 1: each message has its own process "
            "(default: 1000, or 1 with --deterministic)",
            COUNT,
        ),
    ]
    order: Annotated[
        OrderWord,
        _workers(
            "order of a round's messages: the clients that took longest first, or the order in which "
            "messages are sent (default: {default})",
            words(*get_args(OrderWord)),
            default="longest",
        ),
    ]
    ray_address: Annotated[
        str | None,
        _workers(
            "handle messages on all hosts of a Ray cluster: auto, HOST:PORT or ray://HOST:PORT (default: "
            "on this machine)",
            replace(TEXT, metavar="ADDRESS"),
        ),
    ]
    state_memory: Annotated[
        int | str,
        _workers(
            "memory for the clients' states, such as 500MiB; the rest goes to files (default: {default})",
            SIZE,
            default="1GiB",
        ),
    ]
    keep_going: Annotated[bool, KEEP_GOING]
    log_dir: Annotated[
        str | Path | None,
        replace(
            LOG_DIR,
            excludes="resume",
            in_code="parent of the folder with the results (default: {default}); None: no folder is made",
        ),
    ]
    resume: Annotated[str | Path | None, RESUME]
    progress: Annotated[
        bool,
        _output(
            "show no bars and no summary",
            SWITCH,
            default=True,
            in_code="show progress and a summary on stderr (default: {default})",
        ),
    ]
    verbose: Annotated[
        bool | None,
        Option(
            "show Flower's log lines; otherwise they are in run.log of the run's folder, and only warnings "
            "and errors are shown (default: True, but False in a notebook)"
        ),
    ]
    client_output: Annotated[
        ClientOutputWord,
        _output(
            f"which lines of clients are shown: the first {LINES_PER_ROUND} of each round, so that the "
            "rounds stay in sight; all; or none. All of them are in clients.log in the run's folder "
            "(default: {default}, but file with -q and all with --no-progress)",
            words(*get_args(ClientOutputWord)),
            default="auto",
            in_code=f"lines of clients that are shown: auto, the first {LINES_PER_ROUND} of each round, or "
            "all without progress; all; or file, which shows none. All of them are in clients.log in the "
            "run's folder (default: {default})",
        ),
    ]
    trackers: Annotated[
        str | Sequence[str] | None,
        Option(
            "destinations for figures during the run: tensorboard, wandb, mlflow (default: none, or those of "
            "the resumed run)"
        ),
    ]
    mps: Annotated[
        bool,
        Option(
            "let workers compute on a GPU at the same time, each on its share of the processors, through "
            "an MPS daemon of this run; a fault of one worker ends the calls of all",
            SWITCH,
            default=False,
            group="GPUs",
        ),
    ]


#: Options of a simulation by keyword, without the options of its calls.
OPTIONS: Final = MappingProxyType(
    {name: option for name, option in table_of(SimulationOptions).items() if name not in CALL}
)
SimulationOptions.__doc__ = documented(SimulationOptions.__doc__, "Parameters", OPTIONS)
