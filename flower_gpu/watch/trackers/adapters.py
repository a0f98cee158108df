"""The trackers, by the protocol in ``points``; each imports its library when it is made.

TensorBoard has event files in the run's folder. Weights & Biases is online, or offline with
``WANDB_MODE=offline``. MLflow has its own default store (``mlflow.db`` in the current folder), or
``MLFLOW_TRACKING_URI``.
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

_FAILURES: Final = "failures"  # what all of them call failed messages


class TensorBoard:
    """Makes the events itself: torch's writer would import torch, and TensorFlow's TensorFlow."""

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
        """Open a file of events; a run that is resumed has one more in the same folder."""
        folder = self._folder = run.folder.tensorboard
        self._open()
        known = {key: value for key, value in run.config.items() if value is not None}
        self._add(self._hparams_pb(known, trial_id=run.folder.path.name), time.time(), 0)
        rows = "".join(f"\n| {key} | {value} |" for key, value in run.config.items())
        self._add_text("config", f"| | |\n| --- | --- |{rows}", time.time(), 0)
        self._writer.flush()
        return {"see": f"tensorboard --logdir {short(folder)}"}

    def log(self, points: deque[Point]) -> None:
        """Deliver figures, and failed messages as texts. After a full disk, a new file goes on."""
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
        except OSError:  # the writer's thread has ended with it
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
    """A run of its own beside runs that the app may have; nothing of the output is captured."""

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._is_online = os.environ.get("WANDB_MODE", "online") not in _OFFLINE
        if self._is_online and not _has_key(wandb):
            raise ConfigError(_NO_KEY)
        self._has_other = wandb.run is not None
        # Here and not in start(): the service process is there before the first one of the run, so that the
        # end of the run's processes leaves it alone.
        wandb.setup().ensure_service()
        self._axes: set[str] = set()

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open the run, or go on with it."""
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
        """Deliver figures, and failed messages into the summary."""
        while points:
            self._log(points[0])
            points.popleft()

    def _log(self, point: Point) -> None:
        if point.failure:
            before = self._run.summary.get(_FAILURES)
            self._run.summary[_FAILURES] = "\n".join(filter(None, [before, point.failure]))
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
            self._wandb.teardown()  # it ends the service process


def _has_key(wandb: Any) -> bool:
    """Tell whether a run can begin without a question in the terminal; ``wandb.login`` asks the network."""
    settings = wandb.setup().settings
    if settings.api_key or settings.identity_token_file:
        return True
    host = urlsplit(settings.base_url).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False


# MLflow

_MOST_AT_ONCE: Final = 1000  # metrics in one request, which MLflow limits
_MOST_PARAMS: Final = 100  # the same
_MOST_CHARACTERS: Final = 5000  # of a tag
_MOST_OF_PARAM: Final = 6000  # characters
_MOST_OF_NAME: Final = 250  # characters
_HASH_CHARACTERS: Final = 8
_STATUS: Final = {"completed": "FINISHED", "interrupted": "KILLED"}
_SILENCE: Final = "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/?#]*@")
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
        self._id = ""

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open the run, or go on with it."""
        uri = self._default_uri
        # The trace has the address without credentials. They are still those of the default address, unless
        # this run was made on another server.
        if "uri" in run.ids and _public(run.ids["uri"]) != _public(uri):
            uri = run.ids["uri"]
        self._client = self._client_of(tracking_uri=uri)
        if self._id:  # a try before this one has made the run
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
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _describe(self, config: Mapping[str, Value]) -> None:
        """Keep it as params; as tags, where a resumed run changes a param, which MLflow refuses."""
        before = self._client.get_run(self._id).data.params
        texts = {
            _name(key): str(value)[:_MOST_OF_PARAM] for key, value in config.items() if value is not None
        }
        new = [self._param(key, text) for key, text in texts.items() if key not in before]
        for start in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[start : start + _MOST_PARAMS])
        for key, text in texts.items():
            if before.get(key, text) != text:
                self._client.set_tag(self._id, _name(f"resumed.{key}"), text[:_MOST_CHARACTERS])

    def log(self, points: deque[Point]) -> None:
        """Deliver figures, and failed messages into a tag; many points in one request."""
        while points:
            batch: list[Point] = []
            for point in points:
                if batch and sum(len(each.values) for each in [*batch, point]) > _MOST_AT_ONCE:
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
        for start in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST_AT_ONCE])
        if new := [point.failure for point in points if point.failure]:
            failed = [*self._failed, *new]
            self._client.set_tag(self._id, _FAILURES, "\n".join(failed)[:_MOST_CHARACTERS])
            self._failed = failed

    def close(self, outcome: str) -> None:
        """End the run."""
        if outcome:
            self._client.set_tag(self._id, "outcome", outcome)
        with _without_addresses():
            self._client.set_terminated(self._id, status=_STATUS.get(outcome, "FAILED"))


@contextmanager
def _without_addresses() -> Iterator[None]:
    """Have MLflow not print the addresses of a run that ends: they have the credentials of its server."""
    before = os.environ.get(_SILENCE)
    os.environ[_SILENCE] = "true"
    try:
        yield
    finally:
        os.environ.pop(_SILENCE)
        if before is not None:
            os.environ[_SILENCE] = before


def _public(uri: str) -> str:
    """Return the address of a store without user, password and query: it is written to the trace."""
    return _CREDENTIALS.sub("", uri).partition("?")[0]


def _name(name: str) -> str:
    """Return a name as MLflow takes it: few kinds of characters, a path without odd parts, and not too long.

    A long name is cut, and ends with a hash of all of it, so that two of them stay two.
    """
    parts = _NOT_ALLOWED.sub("_", name).split("/")
    allowed = "/".join(part if part.strip(".") else "_" for part in parts)
    if len(allowed) <= _MOST_OF_NAME:
        return allowed
    digest = sha256(name.encode()).hexdigest()[:_HASH_CHARACTERS]
    return f"{allowed[: _MOST_OF_NAME - _HASH_CHARACTERS - 1].rstrip('/')}-{digest}"


#: The trackers by their words in ``TRACKERS`` of the options.
ALL: Final[Mapping[str, Callable[[], Tracker]]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}
