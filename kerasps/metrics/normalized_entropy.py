"""Normalised entropy: cross-entropy, divided by that of a constant prediction."""

from __future__ import annotations

import math

import keras
import tensorflow as tf
from keras import ops

from kerasps.metrics.sums import PredictionsMetric


@keras.saving.register_keras_serializable(package="kerasps")
class NormalizedEntropy(PredictionsMetric):
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

    def __init__(
        self,
        *,
        from_logits: bool = False,
        name: str = "normalized_entropy",
        dtype: str | None = "float64",
    ) -> None:
        super().__init__(from_logits=from_logits, name=name, dtype=dtype)
        self._cross_entropy = self._sum("cross_entropy")
        self._positives = self._sum("positives")
        self._total = self._sum("total")

    def _add_examples(self, labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor) -> None:
        if self.from_logits:
            entropies = tf.nn.sigmoid_cross_entropy_with_logits(labels, predictions)
        else:
            # Not Keras's function, which in a graph uses the logits of a sigmoid's result.
            epsilon = keras.config.epsilon()
            predictions = ops.clip(predictions, epsilon, 1 - epsilon)
            entropies = -labels * ops.log(predictions)
            entropies -= (1 - labels) * ops.log(1 - predictions)
        self._add(self._cross_entropy, weights * entropies)
        self._add(self._positives, weights * labels)
        self._add(self._total, weights)

    def result(self) -> tf.Tensor:
        """Return the normalised entropy; NaN if there are no labels, or all are the same."""
        positives, total = ops.convert_to_tensor(self._positives), self._total
        negatives = total - positives
        both = ops.logical_and(positives > 0, negatives > 0)
        one = ops.ones_like(positives)
        positives, negatives = ops.where(both, positives, one), ops.where(both, negatives, one)
        baseline = -positives * ops.log(positives / (positives + negatives))
        baseline -= negatives * ops.log(negatives / (positives + negatives))
        return ops.where(both, self._cross_entropy / baseline, math.nan)
