"""The number of steps that all workers of a run do together."""

from __future__ import annotations

import time

import keras
import tensorflow as tf

from kerasps.worker_driven.run import Run

# When all steps are given out, the chief waits this long for the next one to be counted. Then it
# does the remaining steps, which a lost worker was given.
_PATIENCE_S = 10.0
_POLL_S = 0.1


class StepBudget:
    """Gives out the steps of a run, each once, up to `max_steps`."""

    def __init__(self, run: Run, model: keras.Model, max_steps: int) -> None:
        self._run = run
        self._model = model
        self._max_steps = max_steps
        first = int(run.agreed("first step", lambda: self._done))
        self._limit = max_steps - first
        self._given_out = run.shared_sum("steps given out", 1)
        self._longest_s = 0.0
        self._taken_at = time.monotonic()

    def reserve(self, wanted: int) -> int:
        """Return how many of `wanted` steps to do; return 0 and stop `fit` if all are given out.

        The chief gets 0 only when all are done. It does the steps of lost workers.
        """
        self._longest_s = max(self._longest_s, time.monotonic() - self._taken_at)
        after = int(self._given_out.add([wanted])[0])
        taken = min(max(self._limit - (after - wanted), 0), wanted)
        if not taken and self._run.is_chief:
            taken = min(wanted, self._missing())
        if not taken:
            self._model.stop_training = True
        self._taken_at = time.monotonic()
        return taken

    def _missing(self) -> int:
        """Wait for the steps of other workers; return how many no worker does."""
        done, since = self._done, time.monotonic()
        # An execution of another worker may take as long as one of this process.
        patience = max(_PATIENCE_S, 3 * self._longest_s)
        while done < self._max_steps and time.monotonic() - since < patience:
            time.sleep(_POLL_S)
            before, done = done, self._done
            if done != before:
                since = time.monotonic()
        return max(0, self._max_steps - done)

    @property
    def _done(self) -> int:
        iterations = self._model.optimizer.iterations
        return int(tf.convert_to_tensor(iterations.storage.read_value()).numpy())
