"""The result of a simulation, and the error of an interrupted one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flwr.app import ArrayRecord, Context
from flwr.common import Parameters

from flower_gpu.apps.folder import short
from flower_gpu.errors import ConfigError
from flower_gpu.watch.fields import metrics_text
from flower_gpu.watch.folds.rounds import RoundPart

# Columns of the table of metrics that every round has
_COLUMNS: Final = ("round", "task", "messages", "failed", "seconds")


class SimulationStoppedError(KeyboardInterrupt):
    """Ctrl-C during a run.

    ``folder``: folder with the results, or None.
    ``can_resume``: True if the run has a checkpoint.
    """

    def __init__(self, folder: Path | None, can_resume: bool) -> None:
        super().__init__("the simulation was interrupted")
        self.folder = folder
        self.can_resume = can_resume


@dataclass(frozen=True, repr=False)
class SimulationResult:
    """The result of a simulation. As the last value of a notebook's cell, it shows its rounds.

    Attributes
    ----------
    context : Context
        The ServerApp's context at the end of the run.
    model : ArrayRecord, Parameters or None
        The final global model, if the app used a strategy.
    summary : dict
        The content of ``result.json``.
    folder : Path or None
        Folder with the results.
    app : str
        Name of the app. ``"app"`` if two components were given.
    history : sequence of RoundPart
        Results of each round, by kind of message, in the order of the run: ``round``, ``task``, ``messages``,
        ``failed``, ``seconds``, ``metrics`` (only numbers) and ``reported_metrics`` (all metrics).
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

        A row has the results of one kind of message in one round. Its columns are ``round``, ``task``,
        ``messages``, ``failed``, ``seconds``, and the metrics. A metric with one of these names has a prefix,
        such as ``metrics.round``.
        """
        rows = []
        for part in self.history:
            row = {name: getattr(part, name) for name in _COLUMNS}
            metrics = {
                f"metrics.{name}" if name in row else name: value
                for name, value in part.reported_metrics.items()
            }
            rows.append({**row, **metrics})
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
            The report. As the last value of a notebook's cell, it is shown there.

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
        summary = self.summary
        of = f" of {summary['num_rounds']}" if summary.get("num_rounds") else ""
        parts = [
            self.app,
            f"{summary['clients']} clients",
            f"{summary['rounds_finished']}{of} rounds",
            summary["outcome"],
        ]
        if summary.get("metrics"):
            task, metrics = list(summary["metrics"].items())[-1]
            parts.append(f"{task}: {text}" if (text := metrics_text(metrics)) else "")
        if self.folder is not None:
            parts.append(short(self.folder))
        return f"<SimulationResult {'; '.join(part for part in parts if part)}>"

    def _repr_html_(self) -> str:
        from flower_gpu.watch.notebook import result_html

        folder = "" if self.folder is None else short(self.folder)
        return result_html(self.app, self.summary, folder, self.history)
