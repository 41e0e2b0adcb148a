"""What is in flight on the `ClusterCoordinator`: executions go out, results come back in completion order.

An execution runs on whichever worker is free. When a worker is lost, TensorFlow's coordinator gives its execution to another
one, so every execution that is sent comes back once, or the wait for it raises. The dispatcher adds what the coordinator does
not have: results as they complete, workers whose data has ended, and a limit to the wait for workers that are all gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import re
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.errors import KeraspsError, PSLostError, WorkerLostError
from kerasps.inputs import WorkerInput, WorkerIterator
from kerasps.train_function import ExecutionResult, TrainFunction

# How often a wait looks whether the coordinator has failed; only failures wait for it, results do not.
_POLL_S = 0.1
# A lost worker that is restarted by a scheduler takes a minute or two; longer than this, someone should look.
_WORKER_TIMEOUT_S = 600.0
_WARN_AFTER_S = 10.0
# The executions that run when an epoch ends in an error get this long to finish; a worker that is gone would take for ever.
_ABANDON_S = 10.0


@dataclass(frozen=True)
class Execution:
    """Steps to do in one go: how many, and the header that carries the global number of the first."""

    num_steps: int
    header: np.ndarray


@dataclass(frozen=True)
class Completed:
    """An execution and its result; one of fewer steps, or none, met the end of a worker's data."""

    execution: Execution
    result: ExecutionResult | None

    @property
    def missing_steps(self) -> int:
        """Steps of the execution that were not done, and that are left to other workers."""
        return self.execution.num_steps - (self.result.steps if self.result is not None else 0)


@dataclass(frozen=True)
class _Event:
    kind: str  # "done", "parked" or "failed"
    worker: int
    completed: Completed | None = None
    error: BaseException | None = None


class Dispatcher:
    """Keeps executions of one epoch in flight.

    Args:
        strategy: the `ParameterServerStrategy`.
        function: what an execution runs.
        inputs: the workers' datasets.
        worker_timeout: seconds without any worker after which the wait ends in `WorkerLostError`. Defaults to the environment
            variable `KERASPS_WORKER_TIMEOUT`, else 600.
    """

    def __init__(
        self, strategy: Any, function: TrainFunction, inputs: WorkerInput, *, worker_timeout: float | None = None
    ) -> None:
        self._strategy = strategy
        self._coordinator = strategy.coordinator
        self._function = function
        self._inputs = inputs
        self._events: queue.Queue[_Event] = queue.Queue()
        self._over = threading.Event()
        self._parked: set[int] = set()
        self._failed: set[int] = set()
        self._sent = 0
        self._timeout = _worker_timeout(worker_timeout)
        self._iterators: Any = None
        self.num_failures = 0

    @property
    def in_flight(self) -> int:
        """Executions sent whose result is not back and which a worker can still take."""
        return self._sent - len(self._parked)

    @property
    def all_exhausted(self) -> bool:
        """Whether the data of every worker has ended."""
        return len(self._parked) == int(self._strategy.num_workers)

    def start_epoch(self, epoch: int, *, must_end: bool) -> None:
        """Makes new iterators on the workers, at the beginning of `epoch`; with `must_end`, of data that ends."""
        self._inputs.start_epoch(epoch, must_end=must_end)
        self._iterators = self._coordinator._create_per_worker_resources(self._inputs.make_iterator)

    def send(self, execution: Execution) -> None:
        """Puts an execution into flight."""
        self._sent += 1
        self._make_cancellable()
        with translated_errors(self._strategy):
            # `ClusterCoordinator.schedule` takes a `tf.function` alone; its cluster takes what runs in the worker's thread.
            self._coordinator._cluster.schedule(self._run, args=(self._iterators, execution, self._over), kwargs=None)

    def wait(self) -> Completed:
        """The next execution that was done, or that met the end of a worker's data, in that order.

        Raises:
            PSLostError: a ps is gone, and with it the variables on it.
            WorkerLostError: no worker has been there for `worker_timeout` seconds.
            Exception: what `train_step` or the input pipeline raised on a worker.
        """
        waiting_since = time.monotonic()
        warned = False
        while True:
            try:
                event = self._events.get(timeout=_POLL_S)
            except queue.Empty:
                self._raise_if_failed()
                # Nothing can come while the workers that have data left are all gone.
                if not self._failed or len(self._parked | self._failed) < self._strategy.num_workers:
                    waiting_since = time.monotonic()
                    continue
                waited = time.monotonic() - waiting_since
                if waited > _WARN_AFTER_S and not warned:
                    warned = True
                    warnings.warn(self._waiting_text(waited), stacklevel=2)
                if waited > self._timeout:
                    self._over.set()
                    raise WorkerLostError(self._waiting_text(waited)) from None
                continue
            if event.kind == "failed":
                self.num_failures += 1
                self._failed.add(event.worker)
                self._raise_if_failed()
                continue
            self._failed.discard(event.worker)
            assert event.completed is not None
            if event.kind == "parked":
                self._parked.add(event.worker)
                return event.completed
            self._sent -= 1
            # TensorFlow counts reports of a lost ps for the life of a job; a result shows that it was a blip.
            counts = self._coordinator._cluster._potential_ps_failures_count
            counts[:] = [0] * len(counts)
            return event.completed

    def finish_epoch(self) -> None:
        """Lets go of workers whose data has ended and drops executions that none has taken."""
        self._over.set()
        with translated_errors(self._strategy):
            self._coordinator.join()
        _compat.CancellationManagerContext(None).__enter__()
        self._over = threading.Event()
        self._events = queue.Queue()
        self._parked.clear()
        self._sent = 0

    def _make_cancellable(self) -> None:
        # When a ps is lost, executions that wait for it end only if they are cancelled, and TensorFlow's coordinator waits for
        # them before it raises. The context that makes a call cancellable is global to the process and leaving it in one
        # worker's thread would take it from a call that another is about to make, so it is left when the epoch is over.
        _compat.CancellationManagerContext(self._coordinator._cluster.closure_queue._cancellation_mgr).__enter__()

    def abandon(self) -> None:
        """Ends what is in flight when an epoch ends in an error: parked workers go on, waiting executions are dropped."""
        self._over.set()
        deadline = time.monotonic() + _ABANDON_S
        # What fails now says nothing that the error which ended the epoch does not.
        with contextlib.suppress(Exception):
            while not self._coordinator.done() and time.monotonic() < deadline:
                time.sleep(_POLL_S / 10)
        _compat.CancellationManagerContext(None).__enter__()

    def _run(self, source: WorkerIterator, execution: Execution, over: threading.Event) -> None:
        """Runs on the coordinator, in the thread of one worker and on that worker's device."""
        worker = _compat.get_current_dispatch_context().worker_index
        if over.is_set():
            return
        num_steps = execution.num_steps if source.remaining is None else min(execution.num_steps, source.remaining)
        if num_steps == 0 or source.exhausted:
            self._events.put(_Event("parked", worker, Completed(execution, None)))
            over.wait()
            return
        try:
            if num_steps not in source.executions:
                source.executions[num_steps] = self._function.execution(source.iterator, num_steps, checked=source.checked)
            result = self._function.run(source.executions[num_steps], source.iterator, execution.header)
        except BaseException as exc:
            self._events.put(_Event("failed", worker, error=exc))
            raise
        self._inputs.consumed[worker] += result.steps
        if source.remaining is not None:
            source.remaining -= result.steps
        source.exhausted = result.steps < num_steps
        self._events.put(_Event("done", worker, Completed(execution, result)))

    def _raise_if_failed(self) -> None:
        if self._coordinator._cluster.closure_queue._error is None:
            return
        self._over.set()  # the coordinator waits for every closure that runs before it raises
        with translated_errors(self._strategy):
            self._coordinator.done()

    def _waiting_text(self, waited: float) -> str:
        gone = ", ".join(f"worker {i}" for i in sorted(self._failed))
        data = " The other workers have read their data to the end." if self._parked else ""
        return (
            f"No worker has taken a step for {waited:.0f} s: {gone} went away and did not come back.{data} Expected: at least "
            f"one worker with data that answers within {self._timeout:.0f} s. Restart a worker at its address (training goes "
            "on by itself), set KERASPS_WORKER_TIMEOUT to wait longer, or give `steps_per_epoch` and data that repeat, so that "
            "others can take its steps."
        )


def _worker_timeout(seconds: float | None) -> float:
    if seconds is not None:
        return seconds
    text = os.environ.get("KERASPS_WORKER_TIMEOUT", str(_WORKER_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(
            "KERASPS_WORKER_TIMEOUT is not a time limit. Expected: a positive number of seconds. "
            f"Received: {text!r}. Give a number like 600, or unset it."
        )
    return seconds


@contextlib.contextmanager
def translated_errors(strategy: Any) -> Iterator[None]:
    """Errors of TensorFlow's runtime that mean a lost task become ours; wrapped errors of the user's code are unwrapped."""
    try:
        yield
    except KeraspsError:
        raise
    except Exception as exc:
        cause = getattr(exc, "original_exception", exc)
        lost = lost_ps(cause)
        if lost is not None:
            first_line = (str(cause).splitlines() or [""])[0]
            raise PSLostError(
                f"ps {lost} at {strategy.description.jobs['ps'][lost]} is gone, and with it its variables. "
                "Expected: ps tasks that live as long as the training. "
                f"Received: {type(cause).__name__}: {first_line}. Start the ps again and this script with it, from the "
                "last checkpoint: `keras.callbacks.BackupAndRestore` resumes at the epoch that was lost. The ps's log says "
                "why it ended.",
                task_type="ps",
                task_index=lost,
            ) from exc
        if cause is not exc and isinstance(cause, Exception):
            raise cause from None
        raise


def lost_ps(error: BaseException) -> int | None:
    """The index of the ps that `error` says is gone, else None."""
    if not isinstance(error, tf.errors.OpError):
        return None
    text = str(error)
    gone = isinstance(error, (_compat.PSUnavailableError, tf.errors.UnavailableError, tf.errors.AbortedError))
    if not (_compat.is_ps_failure(error) or (gone and "/job:ps" in text)):
        return None
    found = re.search(r"/job:ps/replica:0/task:(\d+)", text)
    return int(found.group(1)) if found else None
