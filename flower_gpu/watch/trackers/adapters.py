"""The trackers, which implement the protocol in ``points``. Each imports its library in its constructor.

TensorBoard writes event files into the run's folder. Weights & Biases sends the run to its server, or keeps
it in the run's folder with ``WANDB_MODE=offline``. MLflow uses the store in ``MLFLOW_TRACKING_URI``, by
default ``mlflow.db`` in the current folder.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from netrc import NetrcParseError, netrc
from typing import Any, Final
from urllib.parse import urlsplit

from flower_gpu.apps.folder import short
from flower_gpu.errors import ConfigError
from flower_gpu.watch.trackers.points import Point, TrackedRun, Tracker, Value

#: Name of the failed messages in all trackers.
_FAILURES: Final = "failures"


class TensorBoard:
    """A TensorBoard run. It creates the events itself, because other writers import torch or TensorFlow."""

    def __init__(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._tensor = event_pb2.Event, summary_pb2, tensor_pb2.TensorProto
        self._string = types_pb2.DT_STRING
        self._hparams_pb = hparams_pb
        self._writer_at = EventFileWriter
        self._writer: Any = None

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open an event file. A resumed run gets another file in the same folder."""
        folder = self._folder = run.folder.tensorboard
        self._open()
        known = {key: value for key, value in run.config.items() if value is not None}
        self._add(self._hparams_pb(known, trial_id=run.folder.path.name), time.time(), 0)
        rows = "".join(f"\n| {key} | {value} |" for key, value in run.config.items())
        self._add_text("config", f"| | |\n| --- | --- |{rows}", time.time(), 0)
        self._writer.flush()
        return {"see": f"tensorboard --logdir {short(folder)}"}

    def log(self, points: deque[Point]) -> None:
        """Deliver figures, and failed messages as texts. After an error (full disk), use a new file."""
        self._open()
        added = 0
        try:
            try:
                for point in points:
                    self._add_point(point)
                    added += 1
            finally:
                self._writer.flush()
                for _ in range(added):
                    points.popleft()
        except OSError:
            # The error has ended the writer's thread, so the next call needs a new writer.
            self._writer = None
            raise

    def _open(self) -> None:
        if self._writer is None:
            self._writer = self._writer_at(str(self._folder))

    def _add_point(self, point: Point) -> None:
        if point.failure:
            self._add_text(_FAILURES, point.failure, point.time, point.step)
            return
        values = [self._summary.Summary.Value(tag=tag, simple_value=x) for tag, x in point.values.items()]
        self._add(self._summary.Summary(value=values), point.time, point.step)

    def close(self, outcome: str) -> None:
        """End the run."""
        self._open()
        if outcome:
            self._add_text("outcome", outcome, time.time(), 0)
        self._writer.close()

    def _add_text(self, tag: str, text: str, at: float, step: int) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        value = self._summary.Summary.Value(
            tag=tag,
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensor(dtype=self._string, string_val=[text.encode()]),
        )
        self._add(self._summary.Summary(value=[value]), at, step)

    def _add(self, summary: object, at: float, step: int) -> None:
        self._writer.add_event(self._event(wall_time=at, step=step, summary=summary))


# Weights & Biases

_OFFLINE: Final = ("offline", "dryrun", "disabled")
_NO_KEY: Final = (
    "tracker wandb: there is no API key of Weights & Biases on this machine. Run `wandb login` once, or set "
    "WANDB_API_KEY; WANDB_MODE=offline keeps the run in its folder, and `wandb sync` sends it later"
)


class WandB:
    """A Weights & Biases run, separate from runs of the app. It does not capture the program's output."""

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._is_online = os.environ.get("WANDB_MODE", "online") not in _OFFLINE
        if self._is_online and not _has_key(wandb):
            raise ConfigError(_NO_KEY)
        self._has_other = wandb.run is not None
        # Start the service process here and not in start(). It then exists before the first process of the
        # run, so it stays alive when the run's processes are ended.
        wandb.setup().ensure_service()
        self._axes: set[str] = set()

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open the run, or continue it after a resume."""
        id_ = run.ids.get("id") or secrets.token_hex(4)
        self._run = self._wandb.init(
            id=id_,
            name=run.folder.path.name,
            project=os.environ.get("WANDB_PROJECT") or run.app,
            dir=os.environ.get("WANDB_DIR") or str(run.folder.path),
            config=dict(run.config),
            resume="allow" if run.ids else None,
            reinit="create_new",
            settings=self._wandb.Settings(
                console="off", silent=True, x_disable_stats=True, disable_code=True, disable_git=True
            ),
        )
        if run.ids:
            self._run.config.update(dict(run.config), allow_val_change=True)
        url = self._run.url if self._is_online else None
        return {
            "id": id_,
            "see": url or f"wandb sync {short(run.folder.path)}/wandb/offline-run-*-{id_}",
        }

    def log(self, points: deque[Point]) -> None:
        """Deliver figures. Failed messages go into the summary."""
        while points:
            self._log(points[0])
            points.popleft()

    def _log(self, point: Point) -> None:
        if point.failure:
            previous = self._run.summary.get(_FAILURES)
            self._run.summary[_FAILURES] = "\n".join(filter(None, [previous, point.failure]))
            return
        for group in {name.partition("/")[0] for name in point.values} - self._axes:
            self._run.define_metric(f"{group}/*", step_metric=point.axis)
            self._axes.add(group)
        self._run.log({**point.values, point.axis: point.step}, step=point.number)

    def close(self, outcome: str) -> None:
        """End the run."""
        if outcome:
            self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome == "completed" else 1)
        if not self._has_other:
            # End the service process.
            self._wandb.teardown()


def _has_key(wandb: Any) -> bool:
    """Return True if a run can begin without a prompt in the terminal.

    ``wandb.login`` would check the same, but it uses the network.
    """
    settings = wandb.setup().settings
    if settings.api_key or settings.identity_token_file:
        return True
    host = urlsplit(settings.base_url).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False


# MLflow

# Limits of MLflow: metrics and params in a request, characters of a tag, of a param and of a name.
_MAX_METRICS: Final = 1000
_MAX_PARAMS: Final = 100
_MAX_TAG_CHARACTERS: Final = 5000
_MAX_PARAM_CHARACTERS: Final = 6000
_MAX_NAME_CHARACTERS: Final = 250
_HASH_CHARACTERS: Final = 8
_STATUS: Final = {"completed": "FINISHED", "interrupted": "KILLED"}
_SILENCE: Final = "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/?#]*@")
#: Characters that MLflow refuses in names of metrics and params.
_NOT_ALLOWED: Final = re.compile(r"[^\w\-. /]", re.ASCII)


class MLflow:
    """An MLflow run. It uses only ``MlflowClient``, because functions of ``mlflow`` share the app's run."""

    def __init__(self) -> None:
        import mlflow
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        # MLflow logs the creation of its tables at each start.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        self._client_of, self._metric, self._param = MlflowClient, Metric, Param
        self._default_uri = mlflow.get_tracking_uri()
        self._failed: list[str] = []
        self._id = ""

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open the run, or continue it after a resume."""
        uri = self._default_uri
        # The trace has the address without credentials. So prefer the default address, which may contain
        # them, unless this run was created on another server.
        if "uri" in run.ids and _public(run.ids["uri"]) != _public(uri):
            uri = run.ids["uri"]
        self._client = self._client_of(tracking_uri=uri)
        if self._id:
            # A previous attempt created the run and then failed.
            pass
        elif run.ids:
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
        uri = _public(uri)
        see = uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"
        return {"id": self._id, "uri": uri, "see": see}

    def _experiment(self, app: str) -> str:
        if (id_ := os.environ.get("MLFLOW_EXPERIMENT_ID")) is not None:
            return id_
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or app
        experiment = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if experiment is None else experiment.experiment_id)

    def _describe(self, config: Mapping[str, Value]) -> None:
        """Store a config as params. Values that a resume has changed become tags.

        MLflow refuses to change a param.
        """
        previous = self._client.get_run(self._id).data.params
        texts = {
            _name(key): str(value)[:_MAX_PARAM_CHARACTERS]
            for key, value in config.items()
            if value is not None
        }
        new = [self._param(key, text) for key, text in texts.items() if key not in previous]
        for start in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._id, params=new[start : start + _MAX_PARAMS])
        for key, text in texts.items():
            if previous.get(key, text) != text:
                self._client.set_tag(self._id, _name(f"resumed.{key}"), text[:_MAX_TAG_CHARACTERS])

    def log(self, points: deque[Point]) -> None:
        """Deliver figures, with many points in one request. Failed messages go into a tag."""
        while points:
            batch: list[Point] = []
            for point in points:
                if batch and sum(len(member.values) for member in [*batch, point]) > _MAX_METRICS:
                    break
                batch.append(point)
            self._log(batch)
            for _ in batch:
                points.popleft()

    def _log(self, points: Sequence[Point]) -> None:
        metrics = [
            self._metric(_name(name), value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MAX_METRICS])
        if new := [point.failure for point in points if point.failure]:
            failed = [*self._failed, *new]
            self._client.set_tag(self._id, _FAILURES, "\n".join(failed)[:_MAX_TAG_CHARACTERS])
            self._failed = failed

    def close(self, outcome: str) -> None:
        """End the run."""
        if outcome:
            self._client.set_tag(self._id, "outcome", outcome)
        with _without_addresses():
            self._client.set_terminated(self._id, status=_STATUS.get(outcome, "FAILED"))


@contextmanager
def _without_addresses() -> Iterator[None]:
    """Stop MLflow from printing the addresses of a run at its end, because they contain credentials."""
    previous = os.environ.get(_SILENCE)
    os.environ[_SILENCE] = "true"
    try:
        yield
    finally:
        os.environ.pop(_SILENCE)
        if previous is not None:
            os.environ[_SILENCE] = previous


def _public(uri: str) -> str:
    """Return the address of a store without user, password and query, for the trace."""
    return _CREDENTIALS.sub("", uri).partition("?")[0]


def _name(name: str) -> str:
    """Return a name that MLflow accepts, with only allowed characters and path parts.

    A long name is cut and ends with a hash of the full name, so that different names stay different.
    """
    parts = _NOT_ALLOWED.sub("_", name).split("/")
    allowed = "/".join(part if part.strip(".") else "_" for part in parts)
    if len(allowed) <= _MAX_NAME_CHARACTERS:
        return allowed
    digest = sha256(name.encode()).hexdigest()[:_HASH_CHARACTERS]
    return f"{allowed[: _MAX_NAME_CHARACTERS - _HASH_CHARACTERS - 1].rstrip('/')}-{digest}"


#: The trackers by their names in ``options.TRACKERS``.
ALL: Final[Mapping[str, Callable[[], Tracker]]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}
