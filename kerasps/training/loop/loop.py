"""The loop behind `fit`, `evaluate` and `predict`: steps, sums of results, and callbacks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import keras

from kerasps.inputs import Input
from kerasps.step import TRAIN, Mode, TracedStep
from kerasps.step.tracing.traffic import TrafficMeter
from kerasps.training.contract.dispatching import Dispatching
from kerasps.training.contract.host import LoopSteps, host_of
from kerasps.training.contract.metrics import MetricTotals
from kerasps.training.epoch.epoch_events import Execution, Report
from kerasps.training.loop.batch_callbacks import BatchCallbacks, listen_to_batches
from kerasps.training.loop.execution_size import choose_sizes
from kerasps.training.loop.position import CannotResumeError, LoopPosition
from kerasps.training.loop.predictions import Predictions
from kerasps.training.loop.step_numbers import StepNumbers
from kerasps.training.sessions.session import EXECUTIONS_PER_WORKER

# Results may add up on a worker for this many seconds if no callback needs them after each
# execution. If the worker is lost, the steps of this time are retried.
COLLECT_INTERVAL_S = 0.2


class Loop:
    """Runs passes over an input in one mode."""

    def __init__(
        self,
        model: keras.Model,
        mode: Mode,
        function: TracedStep,
        inputs: Input,
        *,
        steps: int | None,
        callbacks: keras.callbacks.CallbackList,
        predictions: Predictions | None = None,
    ) -> None:
        self._model = model
        self._mode = mode
        self._function = function
        self._inputs = inputs
        self._steps = steps
        self._callbacks = callbacks
        self._predictions = predictions
        # Called between two reports. It may call `drain`.
        self.on_turn: Callable[[], None] = lambda: None
        host = host_of(model)
        self._meter, self._run_meter = host.traffic_meter, host.run_meter
        if mode is not TRAIN:
            # `load_report` shows the traffic of training alone, so no one reads this meter.
            self._meter = TrafficMeter(host.num_ps)
            self._meter.start(function.traffic)
        # True if a callback is called for each execution.
        self._listens = listens = listen_to_batches(callbacks, mode.name)
        interval = 0.0 if predictions is not None or listens else COLLECT_INTERVAL_S
        self._dispatcher: Dispatching = host.dispatcher(
            LoopSteps(
                model=model,
                mode=mode,
                function=function,
                inputs=inputs,
                collect_interval=interval,
            )
        )
        # As in Keras, the last execution of an epoch counts as if it were whole. With several
        # workers it is cut, so that no callback is told of a batch behind the last.
        per_step = function.plans.batches_per_step
        self._counts_whole = per_step == 1 and self._dispatcher.num_workers == 1
        self._has_sources = False
        self._numbers = StepNumbers(model, function)
        self._whole, self._size = choose_sizes(
            model, function, inputs, self._dispatcher, steps=steps, listens=listens
        )
        # Of the current epoch: steps asked for, without those that had no data, and steps counted.
        self._asked = self._done = 0
        self._found_no_data = False
        # The steps counted in all epochs that this loop has run.
        self.num_counted = 0
        self._totals: MetricTotals | None = None
        self._batch_callbacks: BatchCallbacks | None = None
        # The position from which the next epoch resumes, if it was begun before.
        self._resumed: LoopPosition | None = None
        # The steps counted before the current pass, if this loop has begun it.
        self._counted_before: int | None = None

    def run_epoch(self, epoch: int) -> MetricTotals:
        """Run one epoch, or the remaining part of it after `resume`; return its sums."""
        dispatcher, target = self._dispatcher, self._steps
        resumed, self._resumed = self._resumed, None
        goes_on = resumed is not None and resumed.splits is not None
        if not goes_on and (target is None or not self._has_sources):
            self._begin_pass(epoch)
        self._totals = totals = MetricTotals(self._model, self._function)
        if resumed is not None and resumed.steps:
            totals.resume(resumed.steps, resumed.metrics, resumed.logs)
        with self._run_meter.loop(self._mode.name, epoch, dispatcher), dispatcher.hold():
            dispatcher.start_epoch()
            self._run_steps(totals, epoch)
            dispatcher.finish_epoch(totals)
        # With one split, the steps that found no data are the last ones.
        self._numbers.confirm(
            self._done, in_order=self._inputs.num_splits <= 1 or not self._found_no_data
        )
        if dispatcher.is_at_end:
            self._has_sources = False
        if target is not None and self._done < target and not self._is_stopped:
            self._has_sources = False
            warn_of_missing_data()
        return totals

    def _begin_pass(self, epoch: int) -> None:
        self._dispatcher.make_sources(epoch, must_end=self._steps is None)
        self._has_sources, self._counted_before = True, self.num_counted

    def _begins_next_pass(self, epoch: int) -> bool:
        """Begin the next pass over data that repeat, if executions have found no data in this one.

        Call when nothing is pending that this pass has data for.
        """
        if not self._inputs.begins_again or not self._dispatcher.num_in_flight:
            return False
        is_empty = self._counted_before == self.num_counted
        if is_empty or (self._is_stopped and self._done):
            return False
        self._begin_pass(epoch)
        return True

    # Positions

    def restart_numbers(self) -> None:
        """Number steps from the optimizer's current iterations, which users may have set."""
        self._numbers.restart()

    def drain(self) -> LoopPosition:
        """Wait for the steps in flight, count them, and return the loop's position.

        No step is in flight afterwards, and callbacks were called for all counted steps. Call from
        `on_turn`.
        """
        callbacks, totals = self._batch_callbacks, self._totals
        assert callbacks is not None  # an epoch runs
        assert totals is not None
        self._dispatcher.suspend()
        while self._dispatcher.has_backlog:
            self._count(self._dispatcher.wait(), totals, callbacks)
        callbacks.flush()
        return self.position(in_epoch=True)

    def position(self, *, in_epoch: bool) -> LoopPosition:
        """Return the loop's position. Call when nothing is in flight.

        Args:
            in_epoch: True to resume within the epoch, even if all its steps are done; False to
                resume with the next epoch.
        """
        numbers = self._numbers
        totals = self._totals if in_epoch else None
        is_settled = self._batch_callbacks is None
        has_pass = in_epoch or (self._has_sources and self._steps is not None)
        return LoopPosition(
            steps=self._done if in_epoch else 0,
            metrics=[] if totals is None else totals.states,
            logs={} if totals is None else totals.last_logs,
            first_step=numbers.settled - (self._done if in_epoch and is_settled else 0),
            next_step=numbers.next_step,
            seeds=numbers.seeds,
            splits=self._dispatcher.positions if has_pass else None,
            input=self._inputs.position(in_epoch=in_epoch),
        )

    def resume(self, position: LoopPosition) -> None:
        """Resume the next `run_epoch` at a position. Call before the first one.

        Raises CannotResumeError if the position is of another input, or of other metrics. The next
        epoch then begins with its first step.
        """
        try:
            self._check_fits(position)
            if position.splits is None:
                self._inputs.resume_order(position.input, passes_to_repeat=0)
            else:
                must_end = self._steps is None
                splits = position.splits[: self._inputs.num_splits]
                confirmed = [split.confirmed for split in splits]
                self._inputs.resume_pass(position.input, confirmed, must_end=must_end)
                self._has_sources = True
        except (KeyError, TypeError, ValueError) as exc:
            raise CannotResumeError("the input is of another kind") from exc
        if position.splits is not None:
            self._dispatcher.begin_resumed(position.splits)
        if len(position.seeds) == len(self._function.seeds):
            self._numbers.resume(position.first_step, position.next_step, position.seeds)
        self._resumed = position

    def _check_fits(self, position: LoopPosition) -> None:
        num_splits = len({split.source for split in position.splits or []})
        if position.splits is not None and num_splits != self._inputs.num_splits:
            # At least read the epoch in the same order as before.
            self._inputs.resume_order(position.input, passes_to_repeat=1)
            raise CannotResumeError(
                f"its input was read in {num_splits} parts, one per worker, and is read in "
                f"{self._inputs.num_splits} now"
            )
        shapes = [tuple(v.shape) for v in self._function.metrics]
        if position.steps and shapes != [state.shape for state in position.metrics]:
            raise CannotResumeError("the model has other metrics")

    def _run_steps(self, totals: MetricTotals, epoch: int) -> None:
        """Run the steps of an epoch, and add them to `totals`."""
        self._asked = self._done = totals.steps
        self._found_no_data = False
        self._inputs.on_epoch_begin()
        self._size.begin_epoch()
        dispatcher = self._dispatcher
        callbacks = self._batch_callbacks = BatchCallbacks(
            self._callbacks, self._mode.name, totals, before_access=dispatcher.suspend
        )
        self._meter.resume()
        has_data = True
        try:
            while True:
                has_data = has_data and self._send_steps(callbacks)
                if dispatcher.finish_if_done(all_asked=not (has_data and self._wants_more)):
                    if self._begins_next_pass(epoch):
                        continue
                    break
                self._count(dispatcher.wait(), totals, callbacks)
                self.on_turn()
            if self._predictions is not None:
                self._predictions.end()
                self._report_predicted(self._predictions, callbacks, is_last=True)
            callbacks.flush()
        except BaseException:
            dispatcher.abandon()
            raise
        finally:
            self._batch_callbacks = None
            self._meter.pause()
            self._inputs.on_epoch_end()

    def _send_steps(self, callbacks: BatchCallbacks) -> bool:
        """Send executions while there is room; return False if the data have ended."""
        num_batches = self._inputs.num_batches if self._steps is None else self._steps
        while self._has_room(callbacks):
            reported = self._done if self._predictions is None else self._predictions.num_reported
            is_due = num_batches is None or reported < num_batches
            if is_due and callbacks.begin(reported):
                continue  # the callbacks may leave no room
            if not self._ask_for_steps():
                return False
        return True

    def _ask_for_steps(self) -> bool:
        """Send the next execution; return False if the data have ended."""
        wanted = self._size.steps
        if self._steps is not None:
            wanted = min(wanted, self._steps - self._asked)
        data = self._inputs.next_batches(wanted)
        if not data.num_steps:
            return False
        header = self._numbers.next_header(data.num_steps)
        execution = Execution(
            data.num_steps, header, data.batches, data.first_batch, sizes=self._size.sizes
        )
        for part in execution.cut(data.num_steps):
            self._dispatcher.send(part)
        self._asked += data.num_steps
        if self._mode is TRAIN:
            self._run_meter.note_execution(data.num_steps)
        return True

    def _count(self, report: Report, totals: MetricTotals, callbacks: BatchCallbacks) -> None:
        """Add the result of a report, and call the callbacks."""
        self._asked -= report.missing_steps
        self._found_no_data |= report.missing_steps > 0
        result = report.result
        if result is None or not result.steps:
            return
        totals.add(result)
        self._size.note(time.monotonic(), result.steps)
        self._meter.add(report.pushes, result.rows)
        if self._mode is TRAIN:
            self._run_meter.add(report.worker, report.pushes)
            if result.call_seconds is not None:
                self._run_meter.note_call(result.call_seconds)
        first = self._done
        self._done += result.steps
        self.num_counted += result.steps
        if self._predictions is not None:
            self._predictions.add(result.outputs, report.split, report.first_batch)
            self._report_predicted(self._predictions, callbacks)
            return
        if self._is_stopped and first and not callbacks.has_begun:
            return  # after a stop, callbacks are not called for steps that were in flight
        counted_until = self._done
        if self._counts_whole and (self._steps is None or self._done >= self._steps):
            # If this result has several executions, or a part of one, then the last began at a
            # multiple of `_whole`.
            begin = first if self._listens else (self._done - 1) // self._whole * self._whole
            counted_until = max(counted_until, begin + self._whole)
        callbacks.add(first, counted_until - 1)

    def _report_predicted(
        self, predictions: Predictions, callbacks: BatchCallbacks, *, is_last: bool = False
    ) -> None:
        """Call the callbacks for the next outputs in the order of the input."""
        while callbacks.has_begun or not (self._is_stopped and predictions.num_reported):
            first = predictions.num_reported
            outputs = predictions.next_to_report(self._whole, is_last=is_last)
            if not outputs:
                return
            count = self._whole if self._counts_whole else len(outputs)
            callbacks.add(first, first + count - 1, outputs)

    @property
    def _is_stopped(self) -> bool:
        return bool(getattr(self._model, self._mode.stop))

    @property
    def _wants_more(self) -> bool:
        # As in Keras, a loop that is stopped before its first execution still does that one.
        predictions = self._predictions
        has_begun = self._asked if predictions is None else predictions.num_reported
        goes_on = not (self._is_stopped and has_begun)
        return goes_on and (self._steps is None or self._asked < self._steps)

    def _has_room(self, callbacks: BatchCallbacks) -> bool:
        """Return whether an execution may be sent now."""
        dispatcher = self._dispatcher
        if not self._listens:
            limit = EXECUTIONS_PER_WORKER * dispatcher.num_workers
            return self._wants_more and dispatcher.num_in_flight < limit
        # Steps for which callbacks were not called, in flight or not. Outputs that wait for earlier
        # ones of the input do not count: inconsistent splits (see `Predictions.end`) leave gaps, so
        # waiting for these outputs could take for ever.
        ahead = self._asked - self._done
        if not self._wants_more:
            # As in Keras, a batch whose begin callbacks know is done even if they stop there.
            is_due = callbacks.has_begun and (self._steps is None or self._asked < self._steps)
            return is_due and not ahead
        if ahead and self._waits_for_callbacks(callbacks):
            return False
        return ahead <= (dispatcher.num_workers - 1) * self._size.steps

    def _waits_for_callbacks(self, callbacks: BatchCallbacks) -> bool:
        """Return True if callbacks must be called for all done steps before more are sent."""
        dispatcher = self._dispatcher
        if dispatcher.is_dealt_evenly:
            # If one worker had an execution more than the others, it would make updates alone as
            # soon as a callback touched a variable, since the loop then suspends.
            return True
        # While there is a backlog, no step is in flight, so wait, and then send to all workers. But
        # if callbacks assign, send one execution after each, so that each assigned value is used.
        return dispatcher.has_backlog and not callbacks.has_assigned


def warn_of_missing_data() -> None:
    """Warn, as Keras does, that the data ended before the steps of an epoch."""
    warnings.warn(
        "Your input ran out of data; interrupting training. Make sure that your dataset or "
        "generator can generate at least `steps_per_epoch * epochs` batches. You may need to use "
        "the `.repeat()` function when building your dataset.",
        stacklevel=6,
    )
