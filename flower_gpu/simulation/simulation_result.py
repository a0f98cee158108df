"""What a simulation returns, or raises when it is interrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.common import Parameters

from flower_gpu.apps.folder import short
from flower_gpu.errors import ConfigError
from flower_gpu.watch.fields import metrics_text
from flower_gpu.watch.spans import RoundPart


class SimulationStoppedError(KeyboardInterrupt):
    """Ctrl-C during a run.

    ``folder``: where its results are.
    ``can_resume``: whether there is a checkpoint.
    """

    def __init__(self, folder: Path | None, can_resume: bool) -> None:
        super().__init__("the simulation was interrupted")
        self.folder = folder
        self.can_resume = can_resume


@dataclass(frozen=True, repr=False)
class SimulationResult:
    """What a simulation leaves. As the last value of a notebook's cell, it shows its rounds.

    Attributes
    ----------
    context : Context
        The ServerApp's, as the app has left it.
    model : ArrayRecord, Parameters or None
        The final global model, if the app has used a strategy.
    summary : dict
        What came of the run, as in ``result.json``.
    folder : Path or None
        Where the results are.
    app : str
        The app's name; ``"app"`` where two components were given.
    history : sequence of RoundPart
        What came of the messages of each kind in each round, in the order of the run: ``round``, ``task``,
        ``messages``, ``failed``, ``seconds``, ``metrics`` (the numbers) and ``told`` (all metrics).
    """

    context: Context
    model: ArrayRecord | Parameters | None
    summary: Mapping[str, Any]
    folder: Path | None
    app: str = "app"
    history: Sequence[RoundPart] = ()

    @property
    def metrics(self) -> Any:
        """Metrics by round: a pandas DataFrame if pandas is installed, else a list of dictionaries.

        A row is what came of the messages of one kind in one round, with ``round``, ``task``, ``messages``,
        ``failed``, ``seconds``, and a column for each metric. A metric that has one of these names is called
        ``metrics.round``, and so on.
        """
        rows = []
        for part in self.history:
            row: dict[str, Any] = {
                "round": part.round,
                "task": part.task,
                "messages": part.messages,
                "failed": part.failed,
                "seconds": part.seconds,
            }
            own = {f"metrics.{name}" if name in row else name: value for name, value in part.told.items()}
            rows.append({**row, **own})
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def report(self) -> Path:
        """Write the HTML report into the run's folder, as ``flower-gpu report`` does.

        Returns
        -------
        Path
            The page. As the last value of a notebook's cell, it shows itself.

        Raises
        ------
        ConfigError
            If the run has no folder.
        """
        from flower_gpu.watch.notebook import ReportPath
        from flower_gpu.watch.report.page import write_report

        if self.folder is None:
            raise ConfigError(
                "there is no report of this run: it is made from the folder of a run, and with log_dir=None "
                'there is none. Run it with simulate(..., log_dir="runs")'
            )
        return ReportPath(write_report(self.folder))

    def __repr__(self) -> str:
        told = self.summary
        of = f" of {told['num_rounds']}" if told.get("num_rounds") else ""
        parts = [
            self.app,
            f"{told['clients']} clients",
            f"{told['rounds_finished']}{of} rounds",
            told["outcome"],
        ]
        if told.get("metrics"):
            task, metrics = list(told["metrics"].items())[-1]
            parts.append(f"{task}: {text}" if (text := metrics_text(metrics)) else "")
        if self.folder is not None:
            parts.append(short(self.folder))
        return f"<SimulationResult {'; '.join(part for part in parts if part)}>"

    def _repr_html_(self) -> str:
        from flower_gpu.watch.notebook import result_html

        folder = "" if self.folder is None else short(self.folder)
        return result_html(self.app, self.summary, folder, self.history)
