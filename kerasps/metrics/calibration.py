"""Calibration: the ratio of predicted clicks to actual clicks."""

from __future__ import annotations

import math

import keras
import tensorflow as tf
from keras import ops

from kerasps.metrics.sums import PredictionsMetric


@keras.saving.register_keras_serializable(package="kerasps")
class Calibration(PredictionsMetric):
    """Sum of predictions, divided by the sum of labels.

    1 is best. A model that predicts twice as many clicks as there are has 2. The result is NaN
    until a positive label was seen. It follows TorchRec's `CalibrationMetric`, which returns 0 in
    that case.

    ```python
    metric = kerasps.metrics.Calibration()
    metric.update_state([0, 0, 1, 0], [0.1, 0.2, 0.8, 0.3])
    print(float(metric.result()))  # 1.4
    ```

    Args:
        from_logits: whether predictions are logits. Default False: they are probabilities.
        name: the name of the metric. Default `"calibration"`.
        dtype: the dtype of the sums, `"float32"` or `"float64"`. Default `"float64"`. None:
            `keras.config.floatx()`.

    Raises:
        TypeError: `from_logits` is not a bool.
        ValueError: `dtype` is not one of these.
    """

    def __init__(
        self,
        *,
        from_logits: bool = False,
        name: str = "calibration",
        dtype: str | None = "float64",
    ) -> None:
        super().__init__(from_logits=from_logits, name=name, dtype=dtype)
        self._predictions = self._sum("predictions")
        self._labels = self._sum("labels")

    def _add_examples(self, labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor) -> None:
        if self.from_logits:
            predictions = ops.sigmoid(predictions)
        self._add(self._predictions, weights * predictions)
        self._add(self._labels, weights * labels)

    def result(self) -> tf.Tensor:
        """Return the calibration; NaN if the sum of the labels is 0."""
        labels = ops.convert_to_tensor(self._labels)
        some = labels > 0
        return ops.where(some, self._predictions / ops.where(some, labels, 1), math.nan)
