"""The global numbers of steps, and the seeds that follow from them."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from kerasps.step import TracedStep
from kerasps.step.tracing.state import Header


class StepNumbers:
    """Gives each step its global number, and with it the seeds that it draws.

    The numbers begin at the optimizer's iterations. A step's seeds follow from its number alone, so
    no two workers draw the same ones, and a retried execution draws the same ones again. One worker
    draws the same as plain Keras.
    """

    def __init__(self, model: keras.Model, function: TracedStep) -> None:
        self._model = model
        self._function = function
        self.restart()

    def restart(self) -> None:
        """Number the next steps from the current state of the optimizer and the seed generators."""
        optimizer = getattr(self._model, "optimizer", None)
        first = 0 if optimizer is None else int(optimizer._iterations.numpy())
        self.resume(first, first, [v.storage.numpy() for v in self._function.seeds])

    @property
    def next_step(self) -> int:
        """The number of the next step."""
        return int(self._next.first_step)

    @property
    def settled(self) -> int:
        """The number of the first step that is not settled."""
        return self._confirmed

    @property
    def seeds(self) -> list[np.ndarray]:
        """The states from which the next step draws, in the order of `TracedStep.seeds`."""
        return [np.array(seed, np.int64) for seed in self._next.seeds]

    def resume(self, settled: int, next_step: int, seeds: Sequence[np.ndarray]) -> None:
        """Set the properties `settled`, `next_step` and `seeds`."""
        states = [np.array(seed, np.int64).tolist() for seed in seeds]
        self._confirmed = settled
        self._next = Header(next_step, states, self._function.seeds_per_step)

    def next_header(self, num_steps: int) -> Header:
        """Return the header of an execution of the next `num_steps` steps."""
        header = self._next
        self._next = header.after(num_steps)
        return header

    def confirm(self, num_steps: int, *, in_order: bool = True) -> None:
        """Continue the numbers behind the `num_steps` that were done since the last call.

        The new states are written to the seed generators.

        Args:
            in_order: whether they were the first of those that have headers. Then the others, which
                found no data, have used no seeds. With several workers, any step may have found
                none, and the next steps draw by seeds that no header had.
        """
        unused = self.next_step - self._confirmed - num_steps
        after = self._next.after(-unused)
        self._next = after if in_order else after._replace(seeds=self._next.seeds)
        self._confirmed += num_steps
        for variable, seed in zip(self._function.seeds, self.seeds, strict=True):
            variable.assign(tf.cast(seed, variable.storage.dtype))
