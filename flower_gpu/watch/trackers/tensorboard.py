"""TensorBoard: event files in the run's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from flower_gpu.apps.folder import short
from flower_gpu.watch.trackers.points import Point, TrackedRun


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

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open a file of events; a run that is resumed has one more in the same folder."""
        folder = run.folder.tensorboard
        self._writer = self._writer_at(str(folder))
        known = {key: value for key, value in run.config.items() if value is not None}
        self._add(self._hparams_pb(known, trial_id=run.folder.path.name), time.time(), 0)
        rows = "".join(f"\n| {key} | {value} |" for key, value in run.config.items())
        self._add_text("config", f"| | |\n| --- | --- |{rows}", time.time(), 0)
        self._writer.flush()
        return {"see": f"tensorboard --logdir {short(folder)}"}

    def log(self, points: Sequence[Point]) -> None:
        """Take figures, and failed messages as texts."""
        for point in points:
            if point.failure:
                self._add_text("failures", point.failure, point.time, point.step)
                continue
            values = [self._summary.Summary.Value(tag=tag, simple_value=x) for tag, x in point.values.items()]
            self._add(self._summary.Summary(value=values), point.time, point.step)
        self._writer.flush()

    def close(self, outcome: str) -> None:
        """End the run."""
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
