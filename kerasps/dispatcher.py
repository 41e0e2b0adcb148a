"""What is in flight on the `ClusterCoordinator`: executions go out, results come back in completion order.

What the coordinator schedules is a *session*: one per worker and epoch, which takes executions as long as there are some. So
an execution costs the coordinator a call and nothing beside it. When a worker is lost, its session fails, the execution goes
back to the others, and TensorFlow's coordinator starts the session again when the worker is back. Every execution that is
sent comes back once, or the wait for it raises. The dispatcher adds what the coordinator does not have: results as they
complete, workers whose data has ended, and a limit to the wait for workers that are all gone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster import time_limit
from kerasps.errors import WorkerLostError
from kerasps.failures import translated_errors
from kerasps.inputs import Execution, Input, WorkerSource
from kerasps.step_function import ExecutionResult, StepFunction

# How often a wait looks whether the coordinator has failed; only failures wait for it, results do not.
_POLL_S = 0.1
# A lost worker that is restarted by a scheduler takes a minute or two; longer than this, someone should look.
_WORKER_TIMEOUT_S = 600.0
_WARN_AFTER_S = 10.0
# Executions that a worker has at a time: one runs, and the next is there when it ends.
EXECUTIONS_AHEAD = 2
# The executions that run when an epoch ends in an error get this long to finish; a worker that is gone would take for ever.
_ABANDON_S = 10.0


@dataclass(frozen=True)
class Progress:
    """What is new: `missing_steps` that a worker whose data ended has left to others, or a `result` that came back.

    Of a result, `part` says which part of the input it is of, and `first_batch` the place in it of its first batch.
    """

    missing_steps: int = 0
    result: ExecutionResult | None = None
    part: int | None = None
    first_batch: int = 0


@dataclass(frozen=True)
class _Sent:
    """An execution that a worker has: as asked for, the part that there were data for, and what to tell when it is done."""

    asked: Execution
    part: Execution
    progress: Progress


@dataclass(frozen=True)
class _Event:
    """From a worker's thread: an execution is "done", a result was "collected", data have ended ("parked"), there is some again
    ("resumed"), all "failed"."""

    kind: str
    worker: int
    progress: Progress = Progress()
    lost: tuple[Execution, ...] = ()


class _Epoch:
    """What the sessions of one epoch share: executions to take (None wakes a session up), events, and whether it is over.

    A session without data waits at `news`: the epoch is over, or a lost worker has left a part of the input.
    """

    def __init__(self) -> None:
        self.executions: queue.SimpleQueue[Execution | None] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self.over = threading.Event()
        self.news = threading.Condition()

    def end(self, num_sessions: int) -> None:
        """The epoch is over."""
        self.over.set()
        for _ in range(num_sessions):
            self.executions.put(None)
        self.tell()

    def tell(self) -> None:
        """There is news."""
        with self.news:
            self.news.notify_all()


class Dispatcher:
    """Keeps executions of one epoch in flight.

    Args:
        strategy: the `ParameterServerStrategy`.
        function: what an execution runs.
        inputs: the workers' datasets.
        collect_interval: seconds for which a worker may hold what its executions add up to. 0 brings each result back at once,
            which costs as much as a small execution itself.
    """

    def __init__(
        self,
        strategy: Any,
        function: StepFunction,
        inputs: Input,
        *,
        collect_interval: float,
    ) -> None:
        self._strategy = strategy
        self._coordinator = strategy.coordinator
        self._function = function
        self._inputs = inputs
        self._epoch = _Epoch()
        self._parked: set[int] = set()
        self._failed: set[int] = set()
        self._sent = 0
        self._backlog: deque[Progress] = deque()
        self._suspended = False
        self._collect_interval = collect_interval
        self._timeout = time_limit(None, variable="KERASPS_WORKER_TIMEOUT", default=_WORKER_TIMEOUT_S)
        self._iterators: Any = None
        self._sources: dict[int, WorkerSource] = {}
        self.num_failures = 0

    @property
    def in_flight(self) -> int:
        """Executions sent and not over."""
        return self._sent

    @property
    def all_exhausted(self) -> bool:
        """Whether all data are read, and no worker is at work on them."""
        return len(self._parked | self._failed) == int(self._strategy.num_workers) and self._inputs.all_read

    @property
    def is_at_end(self) -> bool:
        """Whether each worker has read data of known length to their end."""
        return bool(self._sources) and all(source.remaining == 0 for source in self._sources.values())

    def make_sources(self, epoch: int, *, must_end: bool) -> None:
        """Makes new sources on the workers, at the beginning of `epoch`; with `must_end`, of data that end."""
        self._inputs.start_pass(epoch, must_end=must_end)
        for worker in self._failed:
            self._inputs.release(worker)  # which it may take, as may the others
        self._iterators = self._coordinator._create_per_worker_resources(self._start_worker)

    def start_epoch(self) -> None:
        """Starts the workers' sessions, which wait for executions."""
        self._sent = 0
        self._backlog.clear()
        self._start_sessions()

    def _start_sessions(self) -> None:
        self._epoch = _Epoch()
        self._parked.clear()
        self._suspended = False
        self._make_cancellable()
        with translated_errors(self._strategy):
            self._function.begin()
            for _ in range(self._strategy.num_workers):
                # `ClusterCoordinator.schedule` takes a `tf.function` alone; its cluster takes what runs in the worker's thread.
                self._coordinator._cluster.schedule(self._session, args=(self._iterators, self._epoch), kwargs=None)

    def send(self, execution: Execution) -> None:
        """Puts an execution into flight."""
        if self._suspended:
            self._start_sessions()
        self._sent += 1
        self._epoch.executions.put(execution)

    def wait(self) -> Progress:
        """The next thing that happens; what a worker held when it was lost is sent again.

        Raises:
            PSLostError: a ps is gone, and with it the variables on it.
            WorkerLostError: no worker has been there for KERASPS_WORKER_TIMEOUT seconds (600).
            Exception: what `train_step` or the input pipeline raised on a worker.
        """
        return self._backlog.popleft() if self._backlog else self._handle(self._next_event())

    def _handle(self, event: _Event) -> Progress:
        if event.kind == "failed":
            self.num_failures += 1
            self._failed.add(event.worker)
            self._raise_if_failed()
            for execution in event.lost:
                self.send(execution)
            return event.progress
        self._failed.discard(event.worker)
        if event.kind == "parked":
            self._parked.add(event.worker)
        elif event.kind == "resumed":
            self._parked.discard(event.worker)
        elif event.kind == "done":
            self._sent -= 1
            # TensorFlow counts reports of a lost ps for the life of a job; an execution shows that it was a blip.
            counts = self._coordinator._cluster._potential_ps_failures_count
            counts[:] = [0] * len(counts)
        return event.progress

    def _next_event(self) -> _Event:
        waiting_since = time.monotonic()
        warned = False
        while True:
            with contextlib.suppress(queue.Empty):
                return self._epoch.events.get(timeout=_POLL_S)
            self._raise_if_failed()
            # Nothing can come while all workers are gone; one that has read its data takes over those of another.
            if len(self._failed) < self._strategy.num_workers:
                waiting_since = time.monotonic()
                continue
            waited = time.monotonic() - waiting_since
            if waited > _WARN_AFTER_S and not warned:
                warned = True
                warnings.warn(self._waiting_text(waited), stacklevel=2)
            if waited > self._timeout:
                self._end_sessions()
                raise WorkerLostError(self._waiting_text(waited))

    def collect(self) -> bool:
        """Fetches what the workers still hold, when nothing is in flight; returns whether `wait` has news.

        Executions whose results are lost with their worker are sent again.
        """
        self._fetch()
        return bool(self._backlog) or not self._epoch.events.empty() or (self.in_flight > 0 and not self.all_exhausted)

    def _fetch(self) -> None:
        for worker, source in self._sources.items():
            try:
                with tf.device(f"/job:worker/replica:0/task:{worker}"):
                    self._collect(worker, source)
            except tf.errors.OpError:
                for execution in source.take_uncollected():
                    self.send(execution)

    def suspend(self) -> None:
        """Waits for what is in flight and ends the sessions: the variables rest, and the workers are free for something else.

        What comes back meanwhile waits for `wait`. The next `send` starts the sessions again.
        """
        if self._suspended:
            return
        while (self._sent and not self.all_exhausted) or self._has_news():
            self._backlog.append(self._handle(self._next_event()))
        self._end_sessions()
        with translated_errors(self._strategy):
            self._coordinator.join()
            self._function.end()
        self._suspended = True

    def _has_news(self) -> bool:
        self._fetch()
        return not self._epoch.events.empty()

    def finish_epoch(self) -> None:
        """Ends the sessions and drops executions that none has taken."""
        self._end_sessions()
        with translated_errors(self._strategy):
            self._coordinator.join()
            self._function.end()
        _compat.CancellationManagerContext(None).__enter__()

    def _make_cancellable(self) -> None:
        # When a ps is lost, executions that wait for it end only if they are cancelled, and TensorFlow's coordinator waits for
        # them before it raises. The context that makes a call cancellable is global to the process and leaving it in one
        # worker's thread would take it from a call that another is about to make, so it is left when the epoch is over.
        _compat.CancellationManagerContext(self._coordinator._cluster.closure_queue._cancellation_mgr).__enter__()

    def abandon(self) -> None:
        """Ends what is in flight when an epoch ends in an error; executions that wait are dropped."""
        self._end_sessions()
        deadline = time.monotonic() + _ABANDON_S
        # What fails now says nothing that the error which ended the epoch does not.
        with contextlib.suppress(Exception):
            while not self._coordinator.done() and time.monotonic() < deadline:
                time.sleep(_POLL_S / 10)
        _compat.CancellationManagerContext(None).__enter__()
        with contextlib.suppress(tf.errors.OpError):
            self._function.end()  # what steps have done is not lost, unless with a ps

    def _start_worker(self) -> WorkerSource:
        """Runs on the coordinator, on the device of a worker that is new or that came back."""
        # Only a session takes a part of the input: TensorFlow makes this anew for each epoch that there was when a worker comes
        # back, also where none runs.
        return WorkerSource(None, lost=True)

    def _session(self, source: WorkerSource, epoch: _Epoch) -> None:
        """Runs on the coordinator, in the thread of one worker and on that worker's device, until the epoch is over."""
        worker = _compat.get_current_dispatch_context().worker_index
        self._sources[worker] = source
        running: deque[_Sent] = deque()
        # Where each result is fetched before the next execution is sent, there is nothing to send ahead.
        executor = _compat.new_executor(self._collect_interval > 0, in_flight_nodes_limit=EXECUTIONS_AHEAD)
        try:
            with _compat.executor_scope(executor):
                while True:
                    self._work(worker, source, epoch, executor, running)
                    if not self._wait_for_data(worker, source, epoch):
                        return
        except BaseException:
            threading.Thread(target=_drain, args=[executor], daemon=True).start()
            # Whatever failed, what the worker holds cannot be told from what it is about to do again.
            source.lost = True
            epoch.events.put(_Event("failed", worker, lost=source.take_uncollected()))
            for sent in running:
                epoch.executions.put(sent.asked)
            self._inputs.release(source.part)
            epoch.tell()
            raise

    def _wait_for_data(self, worker: int, source: WorkerSource, epoch: _Epoch) -> bool:
        """A worker whose data have ended waits here until there is a part for it; False when the epoch is over before.

        A session that ended instead would leave its worker free to take that of a worker which is lost.
        """
        if epoch.over.is_set():
            return False
        epoch.events.put(_Event("parked", worker))
        while not source.has_data:
            with epoch.news:
                epoch.news.wait_for(lambda: epoch.over.is_set() or self._inputs.has_released)
            if epoch.over.is_set():
                return False
            source.become(self._inputs.make_source())
        epoch.events.put(_Event("resumed", worker))
        return True

    def _work(
        self,
        worker: int,
        source: WorkerSource,
        epoch: _Epoch,
        executor: Any,
        running: deque[_Sent],
    ) -> None:
        """Sends executions to the worker until its data or the epoch ends. `running` are those not known to be done."""

        def report(still_running: int) -> None:
            while len(running) > still_running:
                sent = running.popleft()
                if sent.progress.result is None:
                    source.uncollected.append(sent.part)
                epoch.events.put(_Event("done", worker, sent.progress))

        def wait() -> None:
            executor.wait()
            report(0)

        while True:
            if source.lost:
                self._renew(source)
            if not source.has_data:
                wait()
                self._collect(worker, source)
                if source.lost:
                    continue
                self._inputs.finish(source.part)
                return
            if epoch.executions.empty():
                wait()
            execution = epoch.executions.get()
            if execution is None or epoch.over.is_set():
                wait()
                return
            if source.lost:
                epoch.executions.put(execution)
                continue
            keeps_totals = self._collect_interval > 0
            running.append(_Sent(execution, execution, Progress()))
            running[-1] = self._advance(worker, source, execution, keeps_totals=keeps_totals)
            report(EXECUTIONS_AHEAD if keeps_totals else 0)
            if keeps_totals and time.monotonic() >= source.collect_at:
                wait()
                self._collect(worker, source)

    def _renew(self, source: WorkerSource) -> None:
        """Gives a worker something to read: it is new, or came back, or what it held could not be fetched."""
        with source.lock:
            self._inputs.release(source.part)
            self._function.start()
            source.become(self._inputs.make_source())

    def _end_sessions(self) -> None:
        self._epoch.end(self._strategy.num_workers)

    def _advance(self, worker: int, source: WorkerSource, execution: Execution, *, keeps_totals: bool) -> _Sent:
        """Sends an execution to the worker, as far as there are data for it."""
        num_steps = execution.num_steps if source.remaining is None else min(execution.num_steps, source.remaining)
        if num_steps not in source.executions:
            source.executions[num_steps] = self._function.execution(
                source.spec, num_steps, checked=source.checked, keeps_totals=keeps_totals
            )
        function, done, progress = source.executions[num_steps], num_steps, Progress(execution.num_steps - num_steps)
        data = source.resource if execution.batches is None else execution.batches
        if keeps_totals:
            self._function.advance(function, data, execution.header)
        else:
            result = self._function.run(function, data, execution.header)
            done = result.steps
            first = self._inputs.count(source.part, done) + execution.first_batch
            progress = Progress(execution.num_steps - done, result, source.part, first)
        if source.remaining is not None:
            source.remaining -= done
        source.exhausted = done < num_steps
        return _Sent(execution, replace(execution, num_steps=done), progress)

    def _collect(self, worker: int, source: WorkerSource) -> None:
        """Fetches what the worker holds: the results of its uncollected executions."""
        # Both the session and the thread that runs `fit` come here; news is out before the lock is free.
        with source.lock:
            if source.lost or not source.uncollected:
                return
            try:
                result = self._function.collect()
            except BaseException:
                source.lost = True
                raise
            # Where only reading finds the end of the data, steps beyond it have done nothing.
            missing = sum(execution.num_steps for execution in source.uncollected) - result.steps
            source.exhausted = source.exhausted or missing > 0
            source.uncollected.clear()
            source.collect_at = time.monotonic() + self._collect_interval
            self._inputs.count(source.part, result.steps)
            self._epoch.events.put(_Event("collected", worker, Progress(missing, result)))

    def _raise_if_failed(self) -> None:
        if self._coordinator._cluster.closure_queue._error is None:
            return
        self._end_sessions()  # the coordinator waits for everything that runs before it raises
        with translated_errors(self._strategy):
            self._coordinator.done()

    def _waiting_text(self, waited: float) -> str:
        gone = ", ".join(f"worker {i}" for i in sorted(self._failed))
        return (
            f"No worker has taken a step for {waited:.0f} s: {gone} went away and did not come back. Expected: at least "
            f"one worker that answers within {self._timeout:.0f} s. Restart a worker at its address (it goes on by itself), or "
            "set KERASPS_WORKER_TIMEOUT to wait longer."
        )


def _drain(executor: Any) -> None:
    # What is left in an executor that has failed fails too, when the coordinator cancels it; until then nobody may wait for it.
    # TensorFlow prints errors that are still there when the executor is deleted.
    with contextlib.suppress(Exception):
        executor.wait()
    executor.clear_error()
