"""Metrics of predicted clicks: calibration and normalised entropy."""

from __future__ import annotations

import math

import keras
import tensorflow as tf
from keras import ops

from kerasps.metrics.examples import as_examples
from kerasps.metrics.sums import SumsMetric


class ClicksMetric(SumsMetric):
    """Base of metrics that are ratios of sums over labels, predictions and weights.

    A subclass names its sums and says what an example adds to each.
    """

    _sums: tuple[str, ...]

    def __init__(self, *, from_logits: bool, name: str, dtype: str | None) -> None:
        super().__init__(from_logits=from_logits, name=name, dtype=dtype)
        self._states = [self._sum(state) for state in self._sums]

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
        labels, predictions, weights = as_examples(self.name, y_true, y_pred, sample_weight)
        terms = self._terms_of(labels, predictions)
        for state, values in zip(self._states, terms, strict=True):
            state.assign_add(ops.sum(self._terms(weights * values)))

    def _terms_of(self, labels: tf.Tensor, predictions: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Return what each example of weight 1 adds to each sum."""
        raise NotImplementedError


@keras.saving.register_keras_serializable(package="kerasps")
class Calibration(ClicksMetric):
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

    _sums = ("predictions", "labels")

    def __init__(
        self,
        *,
        from_logits: bool = False,
        name: str = "calibration",
        dtype: str | None = "float64",
    ) -> None:
        super().__init__(from_logits=from_logits, name=name, dtype=dtype)

    def _terms_of(self, labels: tf.Tensor, predictions: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return ops.sigmoid(predictions) if self.from_logits else predictions, labels

    def result(self) -> tf.Tensor:
        """Return the calibration; NaN if the sum of the labels is 0."""
        predictions, labels = map(ops.convert_to_tensor, self._states)
        return _ratio(predictions, labels, labels > 0)


@keras.saving.register_keras_serializable(package="kerasps")
class NormalizedEntropy(ClicksMetric):
    """Cross-entropy, divided by that of a model that always predicts the mean label.

    Lower is better. A model that knows only the rate of clicks has 1. The mean label is that of the
    examples since the metric was reset. The result is NaN until both labels were seen. See He et
    al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", and TorchRec's
    `NEMetric`.

    ```python
    metric = kerasps.metrics.NormalizedEntropy()
    metric.update_state([0, 0, 1, 0], [0.1, 0.2, 0.8, 0.3])
    print(float(metric.result()))  # 0.40
    ```

    Args:
        from_logits: whether predictions are logits. Default False: they are probabilities, which
            are clipped to `keras.config.epsilon()` from 0 and 1, as in Keras's losses.
        name: the name of the metric. Default `"normalized_entropy"`.
        dtype: the dtype of the sums, `"float32"` or `"float64"`. Default `"float64"`, in which
            sums over billions of examples are exact to nine digits and more. None:
            `keras.config.floatx()`.

    Raises:
        TypeError: `from_logits` is not a bool.
        ValueError: `dtype` is not one of these.
    """

    _sums = ("cross_entropy", "positives", "total")

    def __init__(
        self,
        *,
        from_logits: bool = False,
        name: str = "normalized_entropy",
        dtype: str | None = "float64",
    ) -> None:
        super().__init__(from_logits=from_logits, name=name, dtype=dtype)

    def _terms_of(self, labels: tf.Tensor, predictions: tf.Tensor) -> tuple[tf.Tensor, ...]:
        if self.from_logits:
            entropies = tf.nn.sigmoid_cross_entropy_with_logits(labels, predictions)
        else:
            # Not Keras's function, which in a graph uses the logits of a sigmoid's result.
            epsilon = keras.config.epsilon()
            predictions = ops.clip(predictions, epsilon, 1 - epsilon)
            entropies = -labels * ops.log(predictions)
            entropies -= (1 - labels) * ops.log(1 - predictions)
        return entropies, labels, ops.ones_like(labels)

    def result(self) -> tf.Tensor:
        """Return the normalised entropy; NaN if there are no labels, or all are the same."""
        entropy, positives, total = map(ops.convert_to_tensor, self._states)
        negatives = total - positives
        both = ops.logical_and(positives > 0, negatives > 0)
        positives, negatives = ops.where(both, positives, 1), ops.where(both, negatives, 1)
        baseline = -positives * ops.log(positives / (positives + negatives))
        baseline -= negatives * ops.log(negatives / (positives + negatives))
        return _ratio(entropy, baseline, both)


def _ratio(value: tf.Tensor, base: tf.Tensor, is_known: tf.Tensor) -> tf.Tensor:
    return ops.where(is_known, value / ops.where(is_known, base, 1), math.nan)
