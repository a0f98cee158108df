"""MLflow: its own default store (``mlflow.db`` in the current folder), or ``MLFLOW_TRACKING_URI``."""

from __future__ import annotations

import getpass
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

from flower_gpu.watch.trackers.points import Point, TrackedRun, Value

_MOST_AT_ONCE: Final = 1000  # metrics in one request, which MLflow limits
_MOST_PARAMS: Final = 100  # the same
_MOST_CHARACTERS: Final = 5000  # of a tag
_FAILURES: Final = "failures"  # a tag
_STATUS: Final = {"completed": "FINISHED", "interrupted": "KILLED"}
_NOT_ALLOWED: Final = re.compile(r"[^\w\-. /]", re.ASCII)  # in names of metrics and params


class MLflow:
    """Uses the client's own methods only: the ones of ``mlflow`` itself share a run with the app's code."""

    def __init__(self) -> None:
        import mlflow
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        # It tells each time that it makes its tables.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        self._client_of, self._metric, self._param = MlflowClient, Metric, Param
        self._default_uri = mlflow.get_tracking_uri()
        self._failed: list[str] = []

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open the run, or go on with it."""
        uri = run.ids.get("uri") or self._default_uri
        self._client = self._client_of(tracking_uri=uri)
        if run.ids:
            self._id = run.ids["id"]
            self._client.update_run(self._id, status="RUNNING")
            tags = self._client.get_run(self._id).data.tags
            self._failed = tags.get(_FAILURES, "").splitlines()
        else:
            tags = {"mlflow.user": getpass.getuser(), "mlflow.source.name": run.app}
            self._id = self._client.create_run(
                self._experiment(run.app), run_name=run.folder.path.name, tags=tags
            ).info.run_id
        self._describe(run.config)
        see = uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"
        return {"id": self._id, "uri": uri, "see": see}

    def _experiment(self, app: str) -> str:
        if (id_ := os.environ.get("MLFLOW_EXPERIMENT_ID")) is not None:
            return id_
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or app
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _describe(self, config: Mapping[str, Value]) -> None:
        """Keep it as params; as tags, where a resumed run changes a param, which MLflow refuses."""
        before = self._client.get_run(self._id).data.params
        texts = {_name(key): str(value) for key, value in config.items() if value is not None}
        new = [self._param(key, text) for key, text in texts.items() if key not in before]
        for start in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[start : start + _MOST_PARAMS])
        for key, text in texts.items():
            if before.get(key, text) != text:
                self._client.set_tag(self._id, f"resumed.{key}", text)

    def log(self, points: Sequence[Point]) -> None:
        """Take figures, and failed messages into a tag."""
        metrics = [
            self._metric(_name(name), value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST_AT_ONCE])
        if failed := [point.failure for point in points if point.failure]:
            self._failed += failed
            self._client.set_tag(self._id, _FAILURES, "\n".join(self._failed)[:_MOST_CHARACTERS])

    def close(self, outcome: str) -> None:
        """End the run."""
        if outcome:
            self._client.set_tag(self._id, "outcome", outcome)
        self._client.set_terminated(self._id, status=_STATUS.get(outcome, "FAILED"))


def _name(name: str) -> str:
    """Return a name as MLflow takes it: few characters, and a path without odd parts."""
    parts = _NOT_ALLOWED.sub("_", name).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)
