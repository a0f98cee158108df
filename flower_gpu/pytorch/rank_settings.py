"""How the ranks of a distributed function work together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from flower_gpu.errors import ConfigError
from flower_gpu.kinds import is_duration, too_long

#: ``ddp``: each rank has the whole model. ``fsdp``: each has a part of every tensor.
StrategyWord = Literal["ddp", "fsdp"]
STRATEGIES: Final[tuple[str, ...]] = get_args(StrategyWord)

#: What becomes of a learning rate; see :func:`flower_gpu.distributed`.
#: Configs of Flower know no None, so ``"none"`` is the same.
LrScalingWord = Literal["none", "linear", "sqrt"]
LR_SCALINGS: Final[tuple[str | None, ...]] = (None, *get_args(LrScalingWord))


@dataclass(frozen=True)
class RankSettings:
    """How the ranks of a function work together; the parameters are those of :func:`flower_gpu.distributed`.

    Raises
    ------
    ConfigError
        If a value cannot be used.
    """

    strategy: str = "ddp"
    lr_scaling: str | None = None
    warmup_steps: int = 0
    sync_batchnorm: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"strategy={self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        if self.lr_scaling not in LR_SCALINGS:
            raise ConfigError(f"lr_scaling={self.lr_scaling!r} is none of 'none', 'linear' and 'sqrt'")
        if self.lr_scaling == "none":
            object.__setattr__(self, "lr_scaling", None)
        steps = self.warmup_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ConfigError(f"warmup_steps={steps!r} is not a number of steps, 0 or more")
        if steps and self.lr_scaling is None:
            raise ConfigError(f"warmup_steps={steps} does nothing without lr_scaling")
        seconds = self.timeout_s
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not (is_number and is_duration(seconds)):
            raise ConfigError(
                f"timeout_s={seconds!r} of a distributed function is no positive number of seconds"
                f"{too_long(seconds)}"
            )
