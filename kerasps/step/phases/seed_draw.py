"""The draw of the seeds of a custom loop's step, on a ps, which counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from kerasps.variables import ParameterServerVariable, call_with
from kerasps.variables.keras.stand_ins import draw_seeds


class SeedDraw:
    """Reads the seed generators of a step on a ps, and advances them there."""

    def __init__(
        self,
        seeds: Sequence[ParameterServerVariable],
        draws: Sequence[int],
        mutex: Callable[[str], tf.Tensor],
    ) -> None:
        self._device = seeds[0].device
        storages = [seed.shards[0] for seed in seeds]

        def draw() -> list[tf.Tensor]:
            with tf.device(self._device):
                return draw_seeds(mutex(self._device), storages, draws)

        with tf.init_scope():
            self._function = tf.function(draw, autograph=False).get_concrete_function()
        self.captures: list[tf.Tensor] = list(self._function.captured_inputs)

    def add_to(self, handles: dict[int, tf.Tensor]) -> list[tf.Tensor]:
        """Add the request to the current graph; return the state of each generator."""
        with tf.device(self._device):
            states: list[tf.Tensor] = call_with(handles, self._function, self.captures)
        return states
