"""The loop behind `fit`, `evaluate` and `predict`: sends executions, merges what they bring back, calls the callbacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.dispatcher import EXECUTIONS_AHEAD, Dispatcher
from kerasps.inputs import Execution, Input
from kerasps.load import LoadMeter
from kerasps.metrics import BatchCallbacks, MetricTotals, listen_to_batches
from kerasps.step_function import ExecutionResult, StepFunction

# What steps add up to may stay on a worker for so long where no callback asks for it with each execution. Should the worker be
# lost, it has to do the steps of this time again.
COLLECT_INTERVAL_S = 0.2
# Executions in flight per worker: those that it has, and one that it takes when one of them is done.
EXECUTIONS_PER_WORKER = EXECUTIONS_AHEAD + 1


@dataclass(frozen=True)
class Mode:
    """What tells `fit`, `evaluate` and `predict` apart.

    Args:
        name: the word in the names of callbacks: `on_<name>_batch_end`.
        step: the method of the model that is a step.
        function: the attribute of the model that keeps the traced step; Keras clears it where it must be traced anew.
        stop: the attribute of the model by which a callback ends the loop.
    """

    name: str
    step: str
    function: str
    stop: str


TRAIN = Mode("train", "train_step", "train_function", "stop_training")
TEST = Mode("test", "test_step", "test_function", "stop_evaluating")
PREDICT = Mode("predict", "predict_step", "predict_function", "stop_predicting")


class Loop:
    """Runs passes over an input in one mode.

    Args:
        model: the model.
        mode: what to do with it.
        function: the model's step.
        inputs: the data.
        steps: steps in each epoch; None for as many as there are data.
        callbacks: the `keras.callbacks.CallbackList`.
        take: what is done with each result beside adding up its metrics: a function of the result, the part of the input that
            it is of, and the place in it of its first batch.
    """

    def __init__(
        self,
        model: keras.Model,
        mode: Mode,
        function: StepFunction,
        inputs: Input,
        *,
        steps: int | None,
        callbacks: Any,
        take: Callable[[ExecutionResult, int | None, int], None] | None = None,
    ) -> None:
        self._model = model
        self._mode = mode
        self._function = function
        self._inputs = inputs
        self._steps = steps
        self._callbacks = callbacks
        self._take = take
        self._strategy = model._distribute_strategy
        self._meter = self._strategy.load_meter
        if mode is not TRAIN:
            # What a training moves is reported, and other steps read other tables: nobody looks at this one.
            self._meter = LoadMeter(self._strategy.num_ps)
            self._meter.start(function.traffic)
        listens = listen_to_batches(callbacks, mode.name)
        # A callback that is told of a batch finds the model as that batch left it, but for what other workers have done.
        self._max_in_flight = (1 if listens else EXECUTIONS_PER_WORKER) * self._strategy.num_workers
        interval = 0.0 if take is not None or listens else COLLECT_INTERVAL_S
        self._dispatcher = Dispatcher(self._strategy, function, inputs, collect_interval=interval)
        self._has_sources = False
        self._numbers = StepNumbers(model, function)
        limit = function.max_fed_steps if inputs.sends_batches else function.max_steps
        self._per_execution = min(model.steps_per_execution, limit or model.steps_per_execution)

    def run_epoch(self, epoch: int) -> MetricTotals:
        """Does one epoch and returns what it added up to."""
        dispatcher, target = self._dispatcher, self._steps
        if target is None or not self._has_sources:
            dispatcher.make_sources(epoch, must_end=target is None)
            self._has_sources = True
        failures = dispatcher.num_failures
        totals = MetricTotals(self._model, self._function)
        with dispatcher.hold():
            dispatcher.start_epoch()
            done = self._run_steps(totals)
            dispatcher.finish_epoch()
        self._numbers.settle(done)
        if dispatcher.num_failures > failures:
            totals.correct_counters()
        if dispatcher.is_at_end:
            self._has_sources = False
        if target is not None and done < target and not self._stopped:
            self._has_sources = False
            warn_of_missing_data()
        return totals

    def _run_steps(self, totals: MetricTotals) -> int:
        """Does the steps of an epoch, which it adds to `totals`, and returns how many they are."""
        dispatcher, target = self._dispatcher, self._steps
        self._inputs.on_epoch_begin()
        done = requested = 0
        report = BatchCallbacks(self._callbacks, self._mode.name, totals, before_access=dispatcher.suspend)
        meter = self._meter
        meter.resume()
        has_more = True
        try:
            while True:
                while has_more and self._has_room(requested):
                    num_steps = self._per_execution if target is None else min(self._per_execution, target - requested)
                    num_steps, batches, first = self._inputs.take(num_steps)
                    has_more = num_steps > 0
                    if has_more:
                        dispatcher.send(Execution(num_steps, self._numbers.take(num_steps), batches, first))
                        requested += num_steps
                if (dispatcher.in_flight == 0 or dispatcher.all_exhausted) and not dispatcher.collect():
                    break
                progress = dispatcher.wait()
                requested -= progress.missing_steps
                result = progress.result
                if result is not None and result.steps:
                    totals.add(result)
                    meter.add(result.steps, result.rows)
                    if self._take is not None:
                        self._take(result, progress.part, progress.first_batch)
                    done += result.steps
                    first = done - result.steps
                    if not self._stopped:  # who has asked to stop hears no more of what was in flight
                        # As in Keras, the last execution of an epoch counts as if it were whole.
                        is_last = target is None or done >= target
                        counted = max(result.steps, self._per_execution) if is_last else result.steps
                        report.add(first, first + counted - 1, result)
            report.flush()
        except BaseException:
            dispatcher.abandon()
            raise
        finally:
            meter.pause()
            self._inputs.on_epoch_end()
        return done

    @property
    def _stopped(self) -> bool:
        return bool(getattr(self._model, self._mode.stop))

    def _has_room(self, requested: int) -> bool:
        has_room = self._dispatcher.in_flight < self._max_in_flight
        return has_room and not self._stopped and (self._steps is None or requested < self._steps)


def warn_of_missing_data() -> None:
    """Warns, as Keras does, that an epoch ended before its steps were done."""
    warnings.warn(
        "Your input ran out of data; interrupting training. Make sure that your dataset or generator can generate at "
        "least `steps_per_epoch * epochs` batches. You may need to use the `.repeat()` function when building your "
        "dataset.",
        stacklevel=6,
    )


class StepNumbers:
    """Gives every step its global number, and with it the seeds that it draws.

    The numbers go on from the optimizer's iterations. A step's seeds follow from its number alone, so that no two workers
    draw the same and an execution that is run again draws what it drew before. One worker draws what plain Keras draws.
    """

    def __init__(self, model: keras.Model, function: StepFunction) -> None:
        self._function = function
        optimizer = getattr(model, "optimizer", None)
        self._next = 0 if optimizer is None else int(optimizer._iterations.numpy())
        self._seeds = [v.storage.numpy().astype(np.int64) for v in function.seeds]
        self._settled = self._next

    def take(self, num_steps: int) -> np.ndarray:
        """The header of an execution of the next `num_steps` steps."""
        header = np.array([self._next, *(n for seed in self._seeds for n in seed)], np.int64)
        self._next += num_steps
        for seed, draws in zip(self._seeds, self._function.seeds_per_step, strict=True):
            seed[1] += num_steps * draws
        return header

    def settle(self, num_steps: int) -> None:
        """Goes on behind the `num_steps` that were done since the last call; executions that found no data have used no seeds.

        Writes the seeds that were used up to the states of their generators.
        """
        unused = self._next - self._settled - num_steps
        self._next = self._settled = self._settled + num_steps
        for variable, seed, draws in zip(self._function.seeds, self._seeds, self._function.seeds_per_step, strict=True):
            seed[1] -= unused * draws
            variable.storage.assign(tf.cast(seed, variable.storage.dtype))
