"""The options of a simulation, for :func:`flower_gpu.simulate` and ``flower-gpu simulate``.

The options of its calls are in :mod:`flower_gpu.options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Literal, get_args

from flower_gpu.apps.app import NUM_ROUNDS_KEY
from flower_gpu.kinds import COUNT, NON_NEGATIVE, SIZE, SWITCH, TEXT, words
from flower_gpu.options import KEEP_GOING, LOG_DIR, RESUME, Option

#: Order of the messages of a round: the longest ones first, or the order in which they are sent.
OrderWord = Literal["longest", "sent"]

#: Lines of clients that are shown: the first lines of each round, all lines, or none.
ClientOutputWord = Literal["auto", "all", "file"]

#: Number of lines of clients that ``auto`` shows after each start of a round.
LINES_PER_ROUND: Final = 20

_FEDERATION: Final = "federation"
_WORKERS: Final = "workers"

#: The options by their keywords.
OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(
    {
        name: replace(option, name=name)
        for name, option in {
            "num_supernodes": Option(
                "number of virtual clients (default with --resume: the earlier number)",
                COUNT,
                group=_FEDERATION,
                synonyms=("clients",),
            ),
            "rounds": Option("number of rounds", COUNT, group=_FEDERATION, run_config_key=NUM_ROUNDS_KEY),
            "seed": Option(
                "seed of the node ids and of all random numbers, those of the ServerApp too: the same "
                "initial model, the same sampled clients (default: drawn, and written down)",
                NON_NEGATIVE,
                group=_FEDERATION,
            ),
            "deterministic": Option(
                "the same seed gives the same final model, bit for bit, with any number of workers, "
                "after crashes and --resume; anything that would change it ends the run",
                SWITCH,
                default=False,
                group=_FEDERATION,
            ),
            "max_workers": Option(
                "maximum number of messages handled at a time (default: the number of cores, or the "
                "shares of GPUs if these are more)",
                COUNT,
                group=_WORKERS,
            ),
            "calls_per_worker": Option(
                "maximum number of messages that one worker handles; 1: each message has its own process "
                "(default: 1000, or 1 with --deterministic)",
                COUNT,
                group=_WORKERS,
            ),
            "order": Option(
                "order of a round's messages: the clients that took longest first, or the order in which "
                "messages are sent (default: {default})",
                words(*get_args(OrderWord)),
                default="longest",
                group=_WORKERS,
            ),
            "ray_address": Option(
                "handle messages on all hosts of a Ray cluster: auto, HOST:PORT or ray://HOST:PORT (default: "
                "on this machine)",
                replace(TEXT, metavar="ADDRESS"),
                group=_WORKERS,
            ),
            "state_memory": Option(
                "memory for the clients' states, such as 500MiB; the rest goes to files (default: {default})",
                SIZE,
                default="1GiB",
                group=_WORKERS,
            ),
            "keep_going": KEEP_GOING,
            "log_dir": replace(LOG_DIR, excludes="resume"),
            "resume": RESUME,
            "progress": Option("show no bars and no summary", SWITCH, default=True, group="output"),
            "client_output": Option(
                f"which lines of clients are shown: the first {LINES_PER_ROUND} of each round, so that the "
                "rounds stay in sight; all; or none. All of them are in clients.log in the run's folder "
                "(default: {default}, but file with -q and all with --no-progress)",
                words(*get_args(ClientOutputWord)),
                default="auto",
                group="output",
            ),
            "mps": Option(
                "let workers compute on a GPU at the same time, each on its share of the processors, through "
                "an MPS daemon of this run; a fault of one worker ends the calls of all",
                SWITCH,
                default=False,
                group="GPUs",
            ),
        }.items()
    }
)
