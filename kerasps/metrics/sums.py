"""Metrics whose states are sums over examples."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

_DTYPES = ("float32", "float64")


class SumsMetric(keras.metrics.Metric):
    """Base of metrics whose states are sums over examples, in float64 unless told otherwise."""

    def __init__(self, *, from_logits: bool, name: str, dtype: str | None) -> None:
        super().__init__(name=name, dtype=dtype)
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"The sums of a metric cannot have this dtype. Expected: 'float32' or 'float64'. "
                f"Received: dtype={dtype!r}. Leave it out, for 'float64'."
            )
        self.from_logits = check_bool("from_logits", from_logits)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make this metric again."""
        return {**super().get_config(), "from_logits": self.from_logits}

    def make_sum(self, name: str, shape: tuple[int, ...] = ()) -> keras.Variable:
        """Make a state. Zero at first, as it must be for the states of workers to add up."""
        return self.add_variable(shape, "zeros", dtype=self.dtype, name=name)

    def add(self, state: keras.Variable, values: tf.Tensor) -> None:
        """Add the sum of `values`, which is worked out in the dtype of the state."""
        state.assign_add(ops.sum(ops.cast(values, self.dtype)))


def check_bool(argument: str, value: object) -> bool:
    """Return an argument that is True or False.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(
            f"Argument `{argument}` is not a truth value. Expected: True or False. Received: "
            f"{argument}={value!r}. Give one of these."
        )
    return value
