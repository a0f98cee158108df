"""``flower_gpu.resumable``: a strategy of any ServerApp that can resume an earlier run."""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from types import MethodType
from typing import Any, Final, TypeVar, cast

from flwr.serverapp.strategy import Result, Strategy

from flower_gpu.apps.folder import in_use
from flower_gpu.errors import ConfigError
from flower_gpu.printable import path_text
from flower_gpu.strategies import rounds
from flower_gpu.strategies.resuming.checkpoint import Checkpoints
from flower_gpu.strategies.resuming.kept_rounds import KeptRounds
from flower_gpu.strategies.resuming.states import StateStore
from flower_gpu.strategies.strategy import FedAvg
from flower_gpu.strategies.strategy_state import RESUMABLE, StrategyState, kind_of

_S = TypeVar("_S", bound=Strategy)
_LOCK: Final = "in-use.lock"


def resumable(strategy: _S, folder: str | os.PathLike[str]) -> _S:
    """Make a strategy write a checkpoint after each round, and resume from an existing checkpoint.

    If the folder is empty, ``start`` begins with the initial arrays. Otherwise it continues after the last
    finished round. The model, the metrics, the strategy's state and the random generators are restored. So if
    a ServerApp was stopped at any moment, you just start it again. A finished run returns its result again.

    Parameters
    ----------
    strategy : Strategy
        An unchanged strategy of ``flwr.serverapp.strategy``, :class:`flower_gpu.FedAvg`,
        :class:`flower_gpu.FedBuff`, or a class derived from the last two. Also any strategy with
        ``state_dict()`` and ``load_state_dict(state)`` that does not override ``start``. The method
        ``start`` of this object is replaced.
    folder : str or path
        Folder on the host of the ServerApp, for this run only. It is created if necessary. Each new run needs
        a new folder.

    Returns
    -------
    Strategy
        The same object.

    Raises
    ------
    ConfigError
        If the state of this strategy is not known, or the folder cannot be used. ``start`` raises it if
        another process uses the folder, or if the checkpoint is of another strategy or another model.
    TypeError
        If this is not a strategy of the Message API, for example a strategy of ``flwr.server.strategy``.

    Examples
    --------
    >>> strategy = resumable(FedAdam(), "/var/lib/flower/runs/my-run")
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(
            f"resumable() takes a strategy of flwr.serverapp.strategy or flower_gpu.FedAvg, and this is a "
            f"{type(strategy).__module__}.{type(strategy).__qualname__}: the older API has no checkpoints"
        )
    kind = strategy.checkpoint_kind if isinstance(strategy, FedAvg) else kind_of(strategy)
    if kind is None:
        raise ConfigError(
            f"resumable() cannot be used with {type(strategy).__name__}, because its state is not known. "
            f"{RESUMABLE}"
        )
    rounds.keep_generator()
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / _LOCK).touch()
    except OSError as error:
        raise ConfigError(
            f"resumable(..., {path_text(path)}): {error.strerror}. Give a folder that this account can "
            "make and write to"
        ) from None
    kept: KeptRounds | None = None
    own_start = MethodType(type(strategy).start, strategy)

    @functools.wraps(own_start)
    def start(*args: Any, **kwargs: Any) -> Result:
        nonlocal kept
        if kept is not None:  # only the first start has checkpoints
            return cast(Result, own_start(*args, **kwargs))
        call = inspect.signature(own_start).bind(*args, **kwargs)
        call.apply_defaults()
        with in_use(path / _LOCK):
            checkpoints = Checkpoints(path, StateStore())
            kept = KeptRounds(checkpoints, checkpoints.read())
            kept.on(call.arguments["grid"])
            if isinstance(strategy, FedAvg):
                return cast(Result, own_start(*args, **kwargs))
            return rounds.run(strategy, **call.arguments, strategy_state=StrategyState(strategy, kind))

    vars(start)["kind"] = kind  # read by the hooks that record the run
    vars(strategy)["start"] = start
    return strategy
