"""The number of steps that a loop sends as one execution.

An execution costs a coordinator, a worker and a ps some 2.5 ms beside its steps. Where no callback
is told of each, several are as good as one: each step still pulls and pushes for itself. So steps
that are known to be fast are sent in longer executions than `steps_per_execution` asks for. Not
from the start: the graph of a longer one takes a worker some time to make ready. And where that
asks for somewhat more steps than are laid out one after the other, they are sent in parts.

Steps that are left over at the end of the data would need a graph of their own, which takes a
worker as long to make ready as hundreds of them take. So they are sent one by one, until there were
so many epochs that the graph would have paid.
"""

from __future__ import annotations

import math

from kerasps.step.running.timing import StepTiming

# Who waits for an execution waits for no more than that: for the next report, or after Ctrl-C.
_MAX_SECONDS = 0.1
# Fewer steps do not bring in what a second graph costs.
_MIN_STEPS = 100
# In a loop of that many blocks or fewer, what it costs beside them is more than another execution.
_MAX_PARTS = 4
# In so many epochs, what is left over has cost what a graph of it costs, however much it is.
_MAX_EPOCHS_ONE_BY_ONE = 32
# Results of several workers come one after the other; in so long, each has sent some.
_WINDOW_S = 0.3


class ExecutionSize:
    """Chooses how many steps the executions of a loop have, and measures how long steps take.

    Args:
        unit: the steps of an execution as the model is compiled, or as many as there may be.
        least: the fewest that are worth an execution, for what is left over; `unit` where that is
            to be one.
        most: those of a longer one; no more than `unit` where there is to be none.
        in_epoch: the steps of an epoch; None where that is not known.
        num_workers: the workers that share them.
        timing: what is known of the step.

    Attributes:
        steps: the steps of the next execution.
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
            # Two for each worker, or some have nothing to do at the end.
            most = min(most, in_epoch // (2 * num_workers))
            unit = min(unit, max(least, in_epoch - in_epoch % least))
        self.steps = self._unit = unit
        self._least = least
        self._longer = max(unit, most - most % unit)
        self._num_workers = num_workers
        self._timing = timing
        self._window: tuple[float, int] | None = None
        self._settle()

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
        """Note a result.

        Args:
            at: when it came, in seconds.
            steps: its steps.
        """
        timing = self._timing
        timing.steps += steps
        if self._window is None:
            self._window = at, 0  # what came before took time to make ready too
            return
        start, before = self._window
        self._window = start, before + steps
        if at - start >= _WINDOW_S:
            seconds = (at - start) * self._num_workers / max(1, before + steps)
            timing.seconds = min(seconds, timing.seconds)
            self._window = at, 0
            self._settle()

    def _settle(self) -> None:
        timing = self._timing
        if timing.steps >= _MIN_STEPS and timing.seconds * self._longer <= _MAX_SECONDS:
            self.steps = self._longer


def unlooped(steps: int, unrolled: int) -> int:
    """Return how many steps of an execution are sent at a time, for it not to be a loop of a few.

    A loop across tasks costs a millisecond an iteration, and once the transfers of a whole block:
    what follows its last iteration runs dead through all tasks.

    Args:
        steps: the steps that the execution would have.
        unrolled: how many are laid out one after the other.
    """
    parts = math.ceil(steps / unrolled)
    return math.ceil(steps / parts) if parts <= _MAX_PARTS else steps


def executions_at_once(most: int, in_epoch: int | None, num_workers: int) -> int:
    """Return how many executions are sent as one, for the steps of all to overlap.

    Args:
        most: how many there may be.
        in_epoch: executions in an epoch; None where that is not known.
        num_workers: the workers that share them.
    """
    if in_epoch is None:
        return max(1, most)
    # Two for each worker, or some have nothing to do at the end.
    most = min(most, in_epoch // (2 * num_workers))
    # Without a shorter one at the end, which is a graph of its own.
    even = [number for number in range(most // 2 + 1, most + 1) if in_epoch % number == 0]
    return max([1, *(even or [most])])
