"""How long calls take: learned from those that are done, and expected of the next ones.

The longest message of a round goes out first. Then a round takes at most a third longer than in the best
order (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969, https://doi.org/10.1137/0117039), and
with many messages for each worker hardly longer at all.

Known of a client are the seconds of its calls, for each kind of message and model of GPU, and the number of
examples that its replies tell of. Its next call is expected to take

    its own seconds               where it was called with such a message on such a GPU
    a line through those of others by number of examples, where its own number is known
    its seconds on other GPUs     times what this one takes in the place of those
    the mean                      of all clients. In sizes with a long tail most are below it: so a client of
                                  which nothing is known goes out early, after those known to be long
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, Literal, get_args

from flower_gpu.leases.lease import Lease
from flower_gpu.simulation.duration_file import DurationFile, Known
from flower_gpu.trace import TRAIN

#: Which messages of a round are handled first: those that take longest, or those that are sent first.
OrderWord = Literal["longest", "sent"]
ORDERS: Final[tuple[str, ...]] = get_args(OrderWord)
LONGEST: Final = "longest"

#: The device of calls without a GPU.
CPU: Final = "cpu"

_SAVE_S: Final = 60.0  # between two times: a run that is killed has not learned in vain


def device_of(lease: Lease | None) -> str:
    """Return what a call runs on: the models of its GPUs."""
    return CPU if lease is None else device_text([share.name for share in lease.shares])


def device_text(models: Sequence[str]) -> str:
    """Return models of GPUs as one text, such as ``"NVIDIA H200"`` or ``"2 x NVIDIA H200"``."""
    counts = {model: models.count(model) for model in sorted(models)}
    return ", ".join(model if count == 1 else f"{count} x {model}" for model, count in counts.items())


@dataclass(frozen=True)
class Line:
    """What a call takes by the client's number of examples."""

    start_s: float
    per_example_s: float

    def seconds(self, examples: float) -> float:
        """Return what a call is expected to take."""
        return self.start_s + self.per_example_s * examples


def fit(points: Iterable[tuple[float, float]]) -> Line | None:
    """Fit a line through points of examples and seconds: least squares, with no part below zero.

    Parameters
    ----------
    points : iterable of tuple of float
        Number of examples and seconds, neither below zero.

    Returns
    -------
    Line or None
        None without points. Where all have the same number of examples, seconds are in proportion to it.
    """
    points = list(points)
    if not points:
        return None
    mean_x, mean_y = (fmean(values) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread > 0 else 0.0
    if spread > 0 and slope <= 0:
        return Line(mean_y, 0.0)
    start_s = mean_y - slope * mean_x
    if spread > 0 and start_s >= 0:
        return Line(start_s, slope)
    squares = sum(x * x for x, _ in points)
    return Line(0.0, sum(x * y for x, y in points) / squares) if squares > 0 else Line(mean_y, 0.0)


class Figures:
    """Seconds of the calls of one kind on one device, by client: of this run, else of earlier ones.

    Earlier runs may have trained for more epochs, or beside other work. So their figures are scaled by what
    this run takes for the clients that are in both.

    Parameters
    ----------
    before : mapping of int to float
        Seconds in earlier runs.
    """

    def __init__(self, before: Mapping[int, float]) -> None:
        self._before = dict(before)
        self._now: dict[int, float] = {}
        self._before_s = sum(before.values())
        self._now_s = 0.0
        # Of clients that are in both
        self._both_before_s = self._both_now_s = 0.0
        self._both = 0

    def __len__(self) -> int:
        return len(self._before) + len(self._now) - self._both

    @property
    def mean_s(self) -> float:
        """The mean of all clients; 0 without any."""
        others_s = max(0.0, self._before_s - self._both_before_s) * self._scale
        return (self._now_s + others_s) / len(self) if len(self) else 0.0

    @property
    def _scale(self) -> float:
        return self._both_now_s / self._both_before_s if self._both_before_s > 0 else 1.0

    def get(self, client: int) -> float | None:
        """Return what a client's calls take; None where there was none."""
        seconds = self._now.get(client)
        if seconds is None and client in self._before:
            return self._before[client] * self._scale
        return seconds

    def learn(self, client: int, seconds: float, *, is_usual: bool = True) -> None:
        """Take note of a call. One that is not as usual counts where there is no other."""
        old = self._now.get(client)
        if not is_usual and (old is not None or client in self._before):
            return
        # The last calls count most: a client's data may grow.
        new = seconds if old is None else (old + seconds) / 2
        self._now[client] = new
        self._now_s += new - (old or 0.0)
        if client in self._before:
            self._both_now_s += new - (old or 0.0)
            if old is None:
                self._both += 1
                self._both_before_s += self._before[client]

    def all(self) -> dict[int, float]:
        """Return the seconds of all clients, those of this run last."""
        scale = self._scale
        before = {client: s * scale for client, s in self._before.items() if client not in self._now}
        return {**before, **self._now}


class Durations:
    """What the calls of a run's clients take. Methods may be called by several threads.

    Parameters
    ----------
    devices : sequence of str
        What its calls may be on, as :func:`device_text` names it.
    file : DurationFile, optional
        Where earlier runs of the app have left what they learned, and where this one does.
    """

    def __init__(self, devices: Sequence[str] = (CPU,), file: DurationFile | None = None) -> None:
        #: Called with what :meth:`learn` is, where somebody else learns, too.
        self.on_learned: Callable[..., None] | None = None
        self._devices = list(devices)
        self._file = file
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._saved_at = time.monotonic()
        self._has_news = False
        found = Known() if file is None else file.read()
        self._examples = {kind: dict(numbers) for kind, numbers in found.examples.items() if numbers}
        self._figures: dict[str, dict[str, Figures]] = {}
        for kind, of_devices in found.seconds.items():
            for device, seconds in of_devices.items():
                if seconds:
                    self._figures.setdefault(kind, {})[device] = Figures(seconds)

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is known."""
        return not self._figures and not self._examples

    def learn(
        self,
        kind: str,
        client: int,
        seconds: float,
        device: str = CPU,
        examples: float | None = None,
        *,
        is_usual: bool = True,
    ) -> None:
        """Take note of a call that has succeeded.

        Parameters
        ----------
        kind : str
            The message's type.
        client : int
            The partition.
        seconds : float
            From the start of its worker, or from when it was sent to one that was there, to its result. The
            wait for a lease is no part of that.
        device : str
            What it ran on.
        examples : float, optional
            How many examples the reply tells of.
        is_usual : bool
            Whether later calls will be like it. If not, it counts only where nothing else is known.
        """
        if self.on_learned is not None:
            self.on_learned(kind, client, seconds, device, examples, is_usual=is_usual)
        with self._lock:
            self._has_news = True
            if examples is not None:
                self._examples.setdefault(kind, {})[client] = examples
            figures = self._figures.setdefault(kind, {}).setdefault(device, Figures({}))
            figures.learn(client, seconds, is_usual=is_usual)
            is_due = time.monotonic() - self._saved_at > _SAVE_S
        if is_due:
            self.save()

    def expected_s(self, calls: Sequence[tuple[str, int | None]]) -> list[float]:
        """Return what each call is expected to take, of which kind and client are given.

        A client that is None is unknown. Figures of one kind can be compared; they are seconds, or numbers of
        examples as long as no call of a kind is done. Where nothing is known all are the same.
        """
        with self._lock:
            kinds = {kind: self._expectation(kind) for kind in {kind for kind, _ in calls}}
            return [kinds[kind].of(client) for kind, client in calls]

    def save(self) -> None:
        """Write down what was learned, if anything was."""
        if self._file is None:
            return
        with self._saving:
            with self._lock:
                if not self._has_news:
                    return
                self._has_news = False
                self._saved_at = time.monotonic()
                known = Known(
                    {kind: dict(one) for kind, one in self._examples.items()},
                    {
                        kind: {device: figures.all() for device, figures in found.items()}
                        for kind, found in self._figures.items()
                    },
                )
            self._file.write(known)

    def _relevant(self, kind: str) -> Mapping[str, Figures]:
        """Return the figures of a kind by device: of this run's devices, if there are any; else of others."""
        found = self._figures.get(kind, {})
        return {device: found[device] for device in self._devices if device in found} or found

    def _expectation(self, kind: str) -> _Expectation:
        # Numbers told in replies of the same kind first: those of an evaluation count other examples.
        kinds = sorted(self._examples, key=lambda one: (one != kind, one != TRAIN, one))
        examples = [self._examples[one] for one in kinds]
        return _Expectation(self._relevant(kind), self._figures.get(kind, {}), examples)


class _Expectation:
    """What calls of one kind are expected to take; for one moment.

    Parameters
    ----------
    figures : mapping of str to Figures
        Of the devices that the call may be on. It is expected to be on each of them as often.
    others : mapping of str to Figures
        Of all devices.
    examples : sequence of mapping
        Numbers of examples by client. The first one that has the client counts.
    """

    def __init__(
        self,
        figures: Mapping[str, Figures],
        others: Mapping[str, Figures],
        examples: Sequence[Mapping[int, float]],
    ) -> None:
        self._figures = figures
        self._others = others
        self._examples = examples
        self._seconds: dict[str, dict[int, float]] = {}
        self._lines: dict[tuple[str, int], Line | None] = {}
        self._mean_examples: float | None = None

    def of(self, client: int | None) -> float:
        """Return what a client's call is expected to take."""
        if not self._figures:
            return self._examples_of(client)
        return fmean(self._on(device, client) for device in self._figures)

    def _examples_of(self, client: int | None) -> float:
        for examples in self._examples:
            if client is not None and client in examples:
                return examples[client]
        if self._mean_examples is None:
            self._mean_examples = fmean(self._examples[0].values()) if self._examples else 0.0
        return self._mean_examples

    def _on(self, device: str, client: int | None) -> float:
        figures = self._figures[device]
        if client is None:
            return figures.mean_s
        seconds = figures.get(client)
        if seconds is not None:
            return seconds
        for number, examples in enumerate(self._examples):
            if client in examples and (line := self._line(device, number)) is not None:
                return line.seconds(examples[client])
        for other in self._others.values():
            seconds = other.get(client)
            if seconds is not None and other.mean_s > 0:
                return seconds * figures.mean_s / other.mean_s
        return figures.mean_s

    def _line(self, device: str, number: int) -> Line | None:
        if (device, number) not in self._lines:
            if device not in self._seconds:
                self._seconds[device] = self._figures[device].all()
            examples = self._examples[number]
            seconds = self._seconds[device]
            self._lines[device, number] = fit((examples[c], s) for c, s in seconds.items() if c in examples)
        return self._lines[device, number]
