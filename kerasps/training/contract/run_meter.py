"""The steps that each worker has done, as the coordinator counts them, and the current loop."""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from kerasps.training.contract.dispatching import Dispatching
from kerasps.training.epoch.worker_state import WorkerActivity

# Rates cover the last seconds: long enough for a few executions of a slow model, short enough to
# show that a worker is lost.
WINDOW_S = 10.0
_SAMPLE_S = 0.5
# Calls are made five times a second for each worker, and some wait for Python.
_CALLS = 101


class Rate:
    """The rate at which a count grows, over the last ten seconds."""

    def __init__(self, now: float, total: int) -> None:
        # The count at earlier times, half a second or more apart.
        self._samples = deque([(now, total)], maxlen=int(WINDOW_S / _SAMPLE_S) + 1)

    def note(self, now: float, total: int) -> None:
        """Note the current count."""
        if now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, total))

    def per_second(self, now: float, total: int) -> float:
        """Return the rate over the last ten seconds, or since the first count. Thread: any."""
        first, *others = tuple(self._samples)
        for sample in others:
            if now - sample[0] < WINDOW_S:
                break
            first = sample
        seconds = now - first[0]
        return (total - first[1]) / seconds if seconds > 0 else 0.0


class RunMeter:
    """Counts the training steps of each worker, and knows the current loop.

    `fit` reports each result that reaches the coordinator; the meter asks no task. A step counts
    when its result does, so a step that is retried counts for the worker that retries it.

    Thread: `fit`'s thread writes; any thread reads.
    """

    def __init__(self) -> None:
        self._totals: dict[int, int] = {}
        # Called after a `fit` without an error, with the seconds that it took.
        self.after_fit: Callable[[float], None] | None = None
        # The largest number of steps of an execution in the last `fit`.
        self.execution_steps = 0
        # The seconds of the last calls to workers in it that ran no steps.
        self._calls: deque[float] = deque(maxlen=_CALLS)
        self._before: dict[int, int] = {}
        self._rates: dict[int, Rate] = {}
        self._began = time.monotonic()
        # For each `fit` in progress, the functions to call when it ends. A callback may call
        # another `fit`.
        self._fits: list[contextlib.ExitStack] = []
        # The mode and the dispatcher of each loop in progress.
        self._loops: list[tuple[str, weakref.ref[Dispatching]]] = []
        self._epoch: int | None = None

    # Reports by `fit`

    @contextlib.contextmanager
    def fit(self) -> Iterator[None]:
        """Count a `fit` as running within this context."""
        began = time.monotonic()
        with contextlib.ExitStack() as at_end:
            self._before, self._rates, self._epoch = dict(self._totals), {}, None
            self.execution_steps = 0
            self._calls.clear()
            self._fits.append(at_end)
            try:
                yield
            finally:
                self._fits.remove(at_end)
        if self.after_fit is not None:
            self.after_fit(time.monotonic() - began)

    def when_fit_ends(self, function: Callable[[], object]) -> None:
        """Register a function to call when the current `fit` ends, also if it fails.

        Does nothing while no `fit` runs.
        """
        if self._fits:
            self._fits[-1].callback(function)

    @contextlib.contextmanager
    def loop(self, mode: str, epoch: int, dispatcher: Dispatching) -> Iterator[None]:
        """Count a loop as running an epoch within this context.

        Args:
            dispatcher: runs its executions. The meter keeps only a weak reference.
        """
        entry = mode, weakref.ref(dispatcher)
        self._loops.append(entry)
        if mode == "train":
            self._began, self._epoch = time.monotonic(), epoch
        try:
            yield
        finally:
            self._loops = [other for other in self._loops if other is not entry]

    def note_execution(self, steps: int) -> None:
        """Note that an execution of training has so many steps."""
        self.execution_steps = max(self.execution_steps, steps)

    def add(self, worker: int, steps: int) -> None:
        """Count training steps of a worker; a result may have those of several executions."""
        now = time.monotonic()
        total = self._totals.get(worker, 0)
        if worker not in self._rates:
            self._rates[worker] = Rate(self._began, total)
        self._totals[worker] = total = total + steps
        self._rates[worker].note(now, total)

    def note_call(self, seconds: float) -> None:
        """Note the time of a call to a worker that ran no steps."""
        self._calls.append(seconds)

    # Queries

    @property
    def is_fitting(self) -> bool:
        """True while a `fit` runs."""
        return bool(self._fits)

    @property
    def call_seconds(self) -> float | None:
        """The median time of a call to a worker without steps in the last `fit`; None if none."""
        calls = self._calls.copy()
        return statistics.median(calls) if calls else None

    @property
    def mode(self) -> str:
        """The mode of the current loop: `"train"`, `"test"` or `"predict"`; empty without one."""
        loops = self._loops
        return loops[-1][0] if loops else ""

    @property
    def epoch(self) -> int | None:
        """The current epoch of the current `fit`, from 0; None without one."""
        return self._epoch if self._fits else None

    @property
    def total(self) -> int:
        """The number of training steps of all workers since this process connected."""
        return sum(self._totals.copy().values())

    def steps(self) -> dict[int, tuple[int, int]]:
        """Return each worker's number of steps in the last `fit`, and in all, by its index."""
        before = self._before
        return {
            worker: (total - before.get(worker, 0), total)
            for worker, total in self._totals.copy().items()
        }

    def steps_per_second(self, worker: int) -> float:
        """Return the steps per second of a worker, over the last ten seconds."""
        rate = self._rates.get(worker)
        if rate is None:
            return 0.0
        return rate.per_second(time.monotonic(), self._totals.get(worker, 0))

    def activities(self) -> dict[int, WorkerActivity]:
        """Return the part of each worker in the current loop; empty without one."""
        loops = self._loops
        dispatcher = loops[-1][1]() if loops else None
        return {} if dispatcher is None else dispatcher.activities()
