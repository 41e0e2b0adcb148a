"""Metrics whose states are sums over examples."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

_DTYPES = ("float32", "float64")


class SumsMetric(keras.metrics.Metric):
    """Base of metrics whose states are sums over examples, in float64 by default."""

    def __init__(self, *, from_logits: bool, name: str, dtype: str | None) -> None:
        super().__init__(name=name, dtype=dtype)
        if self.dtype not in _DTYPES:
            raise ValueError(
                "The sums of a metric cannot have this dtype. Expected: 'float32' or 'float64'. "
                f"Received: dtype={dtype!r}. Leave it out, for 'float64'."
            )
        self.from_logits = check_bool("from_logits", from_logits)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make this metric again."""
        return {**super().get_config(), "from_logits": self.from_logits}

    def _sum(self, name: str, shape: tuple[int, ...] = ()) -> keras.Variable:
        """Make a state. It starts at zero, so that the states of workers can be added."""
        return self.add_variable(shape, "zeros", dtype=self.dtype, name=name)

    def _terms(self, values: tf.Tensor) -> tf.Tensor:
        """Return values rounded to float32, in the dtype of the states.

        So sums in float64 are exact, as long as each value differs by less than a factor of 2**29
        from the sum: they are the same for any order of batches and workers.
        """
        return ops.cast(ops.cast(values, "float32"), self.dtype)


def check_bool(argument: str, value: object) -> bool:
    """Return an argument that is True or False."""
    if not isinstance(value, bool):
        raise TypeError(
            f"Argument `{argument}` is not a bool. Expected: True or False. Received: "
            f"{argument}={value!r}. Give one of these."
        )
    return value
