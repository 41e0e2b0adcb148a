"""The number of steps that a loop sends as one execution.

An execution costs a coordinator, a worker and a ps some 2.5 ms beside its steps. Without a callback
for each execution, kerasps may merge several into one: each step still pulls and pushes for itself.
So steps that are known to be fast are sent in longer executions than `steps_per_execution` asks
for. This does not begin at the start, since a worker takes some time to make a longer graph ready.
If `steps_per_execution` is somewhat larger than the number of unrolled steps, they are sent in
parts.

The remaining steps at the end of the data would need another graph. A worker takes as long to make
it ready as to do hundreds of steps. So these steps are sent one by one, until there were so many
epochs that the graph would have paid off.
"""

from __future__ import annotations

import math

import keras

from kerasps.inputs import Input
from kerasps.step import TracedStep
from kerasps.step.running.traced_step import StepTiming
from kerasps.training.contract.dispatching import Dispatching
from kerasps.training.contract.host import host_of

# The longest that the next report, or Ctrl-C, may wait for an execution.
_MAX_SECONDS = 0.1
# With fewer steps, a second graph costs more than it saves.
_MIN_STEPS = 100
# A loop of at most this many blocks costs more beside them than further executions do.
_MAX_PARTS = 4
# In this many epochs, any number of remaining steps has cost as much as a graph for them.
_MAX_EPOCHS_ONE_BY_ONE = 32
# Results of several workers come one after the other; in this time, each has sent some.
_WINDOW_S = 0.3


class ExecutionSize:
    """Chooses how many steps the executions of a loop have, and measures how long steps take.

    Args:
        unit: the steps of an execution as the model is compiled, or the most that are allowed.
        least: the size of executions for the remaining steps; `unit` to send them as one.
        most: the steps of a longer execution; no more than `unit` if there are no longer ones.

    Attributes:
        steps: the number of steps of the next execution.
    """

    def __init__(
        self,
        unit: int,
        *,
        least: int,
        most: int,
        in_epoch: int | None,
        num_workers: int,
        timing: StepTiming,
    ) -> None:
        if in_epoch is not None:
            # Two executions for each worker, or some workers are idle at the end.
            most = min(most, in_epoch // (2 * num_workers))
            unit = min(unit, max(least, in_epoch - in_epoch % least))
        self.steps = self._unit = unit
        self._least = least
        self._longer = max(unit, most - most % unit)
        self._num_workers = num_workers
        self._timing = timing
        self._window: tuple[float, int] | None = None
        self._lengthen()

    def begin_epoch(self) -> None:
        """Note that an epoch begins."""
        self._timing.epochs += 1

    @property
    def sizes(self) -> list[int]:
        """The numbers of steps that are sent at a time when fewer are left, the largest first."""
        is_worth_a_graph = self._timing.epochs > _MAX_EPOCHS_ONE_BY_ONE
        sizes = {self.steps, self._unit}
        return sorted(sizes if is_worth_a_graph else {*sizes, self._least}, reverse=True)

    def note(self, at: float, steps: int) -> None:
        """Note a result."""
        timing = self._timing
        timing.steps += steps
        if self._window is None:
            self._window = at, 0  # the time before includes making graphs ready
            return
        start, before = self._window
        self._window = start, before + steps
        if at - start >= _WINDOW_S:
            seconds = (at - start) * self._num_workers / max(1, before + steps)
            timing.seconds = min(seconds, timing.seconds)
            self._window = at, 0
            self._lengthen()

    def _lengthen(self) -> None:
        timing = self._timing
        if timing.steps >= _MIN_STEPS and timing.seconds * self._longer <= _MAX_SECONDS:
            self.steps = self._longer


def choose_sizes(
    model: keras.Model,
    function: TracedStep,
    inputs: Input,
    dispatcher: Dispatching,
    *,
    steps: int | None,
    listens: bool,
) -> tuple[int, ExecutionSize]:
    """Return how many steps a loop calls callbacks for at a time, and how many it sends.

    Args:
        steps: the number of steps of each epoch; None to read all data.
        listens: whether a callback is called for each execution.
    """
    host, limits = host_of(model), function.limits
    per_step, max_staleness = function.plans.batches_per_step, host.options.max_staleness
    limit = limits.fed_steps if inputs.sends_batches else limits.steps
    size = model.steps_per_execution
    if max_staleness and function.devices:
        size = min(size, max_staleness)
    size *= per_step
    if limit is not None and limit < size:
        # The largest allowed number of whole steps.
        size = max(limit - limit % per_step, min(limit, per_step))
    whole = size
    # The steps behind which workers wait for each other: those of an epoch, or of a pass.
    together = inputs.num_batches if steps is None or inputs.begins_again else steps
    may_send_more = dispatcher.may_send_more and limit is None and not listens
    overlaps = limits.overlapping > 1
    if not listens:
        at_once = (limits.overlapping, limit, max_staleness)
        most = min(number for number in at_once if number is not None)
        size *= executions_at_once(
            most * per_step // size,
            None if steps is None else (together or steps) // size,
            host.num_workers,
        )
        if not overlaps and limit is None:
            size = unlooped(size // per_step, limits.unrolled) * per_step
    return whole, ExecutionSize(
        size,
        # A callback that listens is called once for all remaining steps.
        least=size if listens or overlaps else min(per_step, size),
        most=limits.unrolled * per_step if may_send_more else 0,  # if they are fast
        in_epoch=together,
        num_workers=host.num_workers,
        timing=function.timing,
    )


def unlooped(steps: int, unrolled: int) -> int:
    """Return how many steps to send at a time, so that no execution is a loop of a few blocks.

    A loop across tasks costs a millisecond per iteration, and once the transfers of a whole block:
    behind its last iteration, TensorFlow passes dead tensors through all tasks.
    """
    parts = math.ceil(steps / unrolled)
    return math.ceil(steps / parts) if parts <= _MAX_PARTS else steps


def executions_at_once(most: int, in_epoch: int | None, num_workers: int) -> int:
    """Return how many executions to send as one, so that their steps overlap."""
    if in_epoch is None:
        return max(1, most)
    # Two for each worker, or some workers are idle at the end.
    most = min(most, in_epoch // (2 * num_workers))
    # Prefer numbers without a shorter execution at the end, which would need another graph.
    even = [number for number in range(most // 2 + 1, most + 1) if in_epoch % number == 0]
    return max([1, *(even or [most])])
