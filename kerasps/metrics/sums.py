"""Metrics whose states are sums over examples."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from kerasps.metrics.examples import as_examples

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

    def _add(self, state: keras.Variable, values: tf.Tensor) -> None:
        """Add the sum of `values`."""
        state.assign_add(ops.sum(self._terms(values)))


class PredictionsMetric(SumsMetric):
    """Base of metrics of labels, predictions and weights alone."""

    def update_state(
        self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: tf.Tensor | None = None
    ) -> None:
        """Add a batch.

        Args:
            y_true: labels from 0 to 1, of shape `(n,)` or `(n, 1)`, or of the shape of `y_pred`.
            y_pred: predictions, likewise.
            sample_weight: a weight for each example. Default None: 1 for each.

        Raises:
            ValueError: the shapes do not match.
        """
        self._add_examples(*as_examples(self.name, y_true, y_pred, sample_weight))

    def _add_examples(self, labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor) -> None:
        raise NotImplementedError


def check_bool(argument: str, value: object) -> bool:
    """Return an argument that is True or False.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(
            f"Argument `{argument}` is not a bool. Expected: True or False. Received: "
            f"{argument}={value!r}. Give one of these."
        )
    return value
