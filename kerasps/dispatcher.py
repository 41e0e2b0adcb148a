"""What is in flight on the `ClusterCoordinator`: executions go out, results come back in completion order.

What the coordinator schedules is a *session*: one per worker and epoch, which takes executions as long as there are some. So
an execution costs the coordinator a call and nothing beside it. When a worker is lost, its session fails, the execution goes
back to the others, and TensorFlow's coordinator starts the session again when the worker is back. Every execution that is
sent comes back once, or the wait for it raises. The dispatcher adds what the coordinator does not have: results as they
complete, workers whose data has ended, and a limit to the wait for workers that are all gone.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.errors import KeraspsError, WorkerLostError
from kerasps.failures import SessionFailures, comes_from, lost_ps, translated_errors
from kerasps.flights import Flight, aboard, uninterrupted, worker_timeout
from kerasps.inputs import Execution, Input, WorkerSource
from kerasps.reuse import CALLS, NAMES
from kerasps.step_function import ExecutionResult, StepFunction

# How often a wait looks whether the coordinator has failed; only failures wait for it, results do not.
_POLL_S = 0.1
_WARN_AFTER_S = 10.0
# Executions that a worker has at a time: one runs, and the next is there when it ends.
EXECUTIONS_AHEAD = 2
# When an epoch ends in an error, this long is waited for executions that run; afterwards, whoever looks at a variable waits.
_ABANDON_S = 10.0
# When a worker has failed, the executions of others get this long before they are cancelled: cut off, one has pushed a part.
_DRAIN_S = 2.0


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
    """What the sessions of one flight share: executions to take (None wakes a session up), events, and whether it is over.

    A session without data waits at `news`: the epoch is over, or a lost worker has left a part of the input. `error` is what
    ends the epoch. Its lock is for the threads of sessions and of the flight; the one that runs `fit` keeps away from it.
    """

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.executions: queue.SimpleQueue[Execution | None] = queue.SimpleQueue()
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self.news = threading.Condition()
        self._is_over = False
        self.error: BaseException | None = None
        self.wake: Callable[[], None] = lambda: None
        self._addresses = addresses
        # How many sessions, and executors of sessions that failed, may have something on each worker.
        self._at_work: Counter[int] = Counter()

    def is_over(self) -> bool:
        """Whether nothing more is to begin."""
        return self._is_over

    def enter(self, worker: int) -> bool:
        """A session begins; False when the epoch is over before."""
        with self.news:
            if not self._is_over:
                self._at_work[worker] += 1
            return not self._is_over

    def leave(self, worker: int) -> None:
        """Nothing of a session is on its worker any more."""
        with self.news:
            self._at_work[worker] -= 1
            self.news.notify_all()

    def wait_until_idle(self, timeout: float) -> bool:
        """Waits until nothing of any session is on a worker."""
        with self.news:
            return self.news.wait_for(lambda: not any(self._at_work.values()), timeout)

    def holders(self) -> str:
        """Says who something is on, for a message."""
        at_work = [worker for worker, count in list(self._at_work.items()) if count]
        names = ", ".join(f"worker {worker} at {self._addresses[worker]}" for worker in at_work)
        return f"{names} does not answer, or waits for a ps that does not" if names else "a ps does not answer"

    def fail(self, worker: int, error: BaseException) -> None:
        """The epoch is to end in `error`, if it has none yet."""
        self.error = self.error or error
        self.events.put(_Event("failed", worker))
        self.wake()

    def end(self, num_sessions: int) -> None:
        """The epoch is over."""
        self._is_over = True
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
        self._addresses = strategy.description.jobs["worker"]
        self._epoch = _Epoch(self._addresses)
        self._owner = threading.Lock()
        self._flight: Flight | None = None
        self._failures = SessionFailures()
        self._parked: set[int] = set()
        # A worker that was lost before is not there to read its part of the input.
        self._failed = {i for i, worker in enumerate(self._coordinator._cluster.workers) if worker._is_dead_with_error}
        self._sent = 0
        self._backlog: deque[Progress] = deque()
        self._suspended = self._is_suspending = False
        self._collect_interval = collect_interval
        self._timeout = worker_timeout()
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
        # An interrupt within TensorFlow's queues leaves them locked.
        self._iterators = uninterrupted(lambda: self._coordinator._create_per_worker_resources(self._start_worker))

    def hold(self) -> threading.Lock:
        """A lock to hold, in a `with` statement, from `start_epoch` to the end of the epoch: no steps run when it is free."""
        self._owner = threading.Lock()
        return self._owner

    def start_epoch(self) -> None:
        """Starts the workers' sessions, which wait for executions."""
        self._sent = 0
        self._backlog.clear()
        self._take_off()

    def _take_off(self) -> None:
        self._epoch = _Epoch(self._addresses)
        self._parked.clear()
        self._suspended = False
        self._flight = Flight(self._owner, functools.partial(self._fly, self._epoch, self._iterators), self._epoch.holders)
        self._flight.start()

    def _fly(self, epoch: _Epoch, iterators: Any, flight: Flight) -> None:
        """Has sessions run until `flight` is over; in its thread, from where values rest to where they rest again."""
        epoch.wake = flight.wake
        num_sessions = self._strategy.num_workers
        self._function.load()
        # Executions that wait for a lost ps end only if they are cancelled. The context that makes a call cancellable is global
        # to the process, so it is left when no thread is about to make a call.
        cancellation = _compat.CancellationManager()
        _compat.CancellationManagerContext(cancellation).__enter__()
        try:
            for _ in range(num_sessions):
                # `ClusterCoordinator.schedule` takes a `tf.function` alone; its cluster takes what runs in the worker's thread.
                self._coordinator._cluster.schedule(self._session, args=(iterators, epoch), kwargs=None)
            flight.wait_until_over(lambda: self._has_failed(epoch))
        finally:
            epoch.end(num_sessions)
            self._wait_until_idle(epoch, cancellation)
            _compat.CancellationManagerContext(None).__enter__()
            self._function.store()
        if epoch.error is not None:
            raise epoch.error

    def _has_failed(self, epoch: _Epoch) -> bool:
        return epoch.error is not None or self._coordinator._cluster.closure_queue._error is not None

    def _wait_until_idle(self, epoch: _Epoch, cancellation: Any) -> None:
        """Waits, in the flight's thread, for what is on the workers; where something has failed, it is cancelled in the end."""
        failed_at: float | None = None
        while not epoch.wait_until_idle(_POLL_S):
            if self._has_failed(epoch):
                failed_at = failed_at or time.monotonic()
                is_ps_lost = epoch.error is None or lost_ps(epoch.error) is not None
                if is_ps_lost or time.monotonic() > failed_at + _DRAIN_S:
                    cancellation.start_cancel()
        if self._coordinator._cluster.closure_queue._error is not None:
            try:
                self._coordinator.done()  # which raises what it has, and is ready for the next epoch then
            except Exception as exc:
                epoch.error = epoch.error or exc

    def send(self, execution: Execution) -> None:
        """Puts an execution into flight."""
        self._check_suspended()
        self._put(execution)

    def _put(self, execution: Execution) -> None:
        if self._suspended:
            self._take_off()
        self._sent += 1
        self._epoch.executions.put(execution)

    def wait(self) -> Progress:
        """The next thing that happens; what a worker held when it was lost is sent again.

        Raises:
            PSLostError: a ps is gone, and with it the variables on it.
            WorkerLostError: no worker has been there for KERASPS_WORKER_TIMEOUT seconds (600).
            Exception: what `train_step` or the input pipeline raised on a worker.
        """
        self._check_suspended()
        return self._backlog.popleft() if self._backlog else self._handle(self._next_event())

    def _handle(self, event: _Event) -> Progress:
        if event.kind == "failed":
            self.num_failures += 1
            self._failed.add(event.worker)
            self._raise_if_failed()
            for execution in event.lost:
                self._put(execution)
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
                raise WorkerLostError(self._waiting_text(waited))

    def collect(self) -> bool:
        """Fetches what the workers still hold, when nothing is in flight; returns whether `wait` has news.

        Executions whose results are lost with their worker are sent again.
        """
        self._fetch()
        return bool(self._backlog) or not self._epoch.events.empty() or (self.in_flight > 0 and not self.all_exhausted)

    def _fetch(self) -> None:
        # Not in this thread: an interrupt within `tf.device` would leave it on that device.
        for execution in uninterrupted(self._fetch_all):
            self._put(execution)

    def _fetch_all(self) -> list[Execution]:
        """Fetches what the workers still hold; returns the executions whose results are lost."""
        lost: list[Execution] = []
        for worker, source in list(self._sources.items()):
            try:
                with tf.device(worker_device(worker)):
                    self._collect(worker, source)
            except tf.errors.OpError:
                lost += source.take_uncollected()
        return lost

    def suspend(self) -> None:
        """Waits for what is in flight and ends the sessions: the variables rest, and the workers are free for something else.

        What comes back meanwhile waits for `wait`. The next `send` starts the sessions again.
        """
        if self._suspended:
            return
        self._is_suspending = True
        while (self._sent and not self.all_exhausted) or self._has_news():
            self._backlog.append(self._handle(self._next_event()))
        self._land()
        self._suspended = True
        self._is_suspending = False

    def _check_suspended(self) -> None:
        if self._is_suspending:
            raise KeraspsError(
                "A callback caught what interrupted it while the steps in flight were waited for, so it is not known which of "
                "them are done. Expected: an interrupt that ends `fit`. Received: a callback that goes on. Let it through."
            )

    def _has_news(self) -> bool:
        self._fetch()
        return not self._epoch.events.empty()

    def finish_epoch(self) -> None:
        """Ends the sessions and drops executions that none has taken."""
        self._land()

    def _land(self) -> None:
        """Ends the flight, and raises what it has ended in."""
        if self._flight is not None:
            self._flight.end()
            self._flight.wait()
            if self._flight.error is not None:
                with translated_errors(self._strategy):
                    raise self._flight.error

    def abandon(self) -> None:
        """Ends what is in flight when an epoch ends in an error; executions that wait are dropped."""
        NAMES.retire()
        if self._flight is not None:
            self._flight.end()
            # What fails now says nothing that the error which ended the epoch does not.
            self._flight.wait(_ABANDON_S)

    def _start_worker(self) -> WorkerSource:
        """Runs on the coordinator, on the device of a worker that is new or that came back."""
        # Only a session takes a part of the input: TensorFlow makes this anew for each epoch that there was when a worker comes
        # back, also where none runs.
        return WorkerSource(None, lost=True)

    def _session(self, source: WorkerSource, epoch: _Epoch) -> None:
        """Runs on the coordinator, in the thread of one worker and on that worker's device, until the epoch is over."""
        worker = _compat.get_current_dispatch_context().worker_index
        if not epoch.enter(worker):
            return
        self._sources[worker] = source
        running: deque[_Sent] = deque()
        # Where each result is fetched before the next execution is sent, there is nothing to send ahead.
        executor = _compat.new_executor(self._collect_interval > 0, in_flight_nodes_limit=EXECUTIONS_AHEAD)
        try:
            with aboard(), _sending_through(executor):
                while True:
                    self._work(worker, source, epoch, executor, running)
                    if not self._wait_for_data(worker, source, epoch):
                        break
        except BaseException as exc:
            NAMES.retire()  # what was sent to the worker may still run there
            threading.Thread(target=_drain, args=[executor, epoch, worker], daemon=True).start()
            # Whatever failed, what the worker holds cannot be told from what it is about to do again.
            source.lost = True
            if self._failures.may_be_loss(exc):
                epoch.events.put(_Event("failed", worker, lost=source.take_uncollected()))
                for sent in running:
                    epoch.executions.put(sent.asked)
                self._inputs.release(source.part)
                epoch.tell()
                retry = self._failures.retry(exc, worker)
                if retry is not None and epoch.is_over():
                    return  # nothing is missed
                if retry is not None:
                    raise retry from None
            comes_from(exc, worker)
            epoch.fail(worker, exc)
            return
        epoch.leave(worker)

    def _wait_for_data(self, worker: int, source: WorkerSource, epoch: _Epoch) -> bool:
        """A worker whose data have ended waits here until there is a part for it; False when the epoch is over before.

        A session that ended instead would leave its worker free to take that of a worker which is lost.
        """
        if epoch.is_over():
            return False
        epoch.events.put(_Event("parked", worker))
        while not source.has_data:
            with epoch.news:
                epoch.news.wait_for(lambda: epoch.is_over() or self._inputs.has_released)
            if epoch.is_over():
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
                self._failures.forget(worker)
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
            if execution is None or epoch.is_over():
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
        if self._flight is not None and (self._flight.has_landed or self._has_failed(self._epoch)):
            self._land()

    def _waiting_text(self, waited: float) -> str:
        gone = ", ".join(f"worker {i}" for i in sorted(self._failed))
        return (
            f"No worker has taken a step for {waited:.0f} s: {gone} went away and did not come back. Expected: at least "
            f"one worker that answers within {self._timeout:.0f} s. Restart a worker at its address (it goes on by itself), or "
            "set KERASPS_WORKER_TIMEOUT to wait longer."
        )


def worker_device(worker: int) -> str:
    """The name of a worker's device."""
    return f"/job:worker/replica:0/task:{worker}"


@contextlib.contextmanager
def _sending_through(executor: Any) -> Iterator[None]:
    """While active, this thread's operations go through `executor`."""
    context = _compat.eager_context()
    before = context.executor
    context.executor, CALLS.are_waited_for = executor, False
    try:
        yield
    finally:
        context.executor, CALLS.are_waited_for = before, True
        # What is deleted when a task is gone, and was on it, leaves an error that nobody asked for, and that would be printed.
        before.clear_error()


def _drain(executor: Any, epoch: _Epoch, worker: int) -> None:
    # What is left in an executor that has failed fails too, at the latest when it is cancelled; until then no session may wait.
    # TensorFlow prints errors that are still there when the executor is deleted.
    for _ in range(2 * EXECUTIONS_AHEAD + 1):
        try:
            executor.wait()
            break
        except tf.errors.OpError:
            executor.clear_error()
    epoch.leave(worker)
