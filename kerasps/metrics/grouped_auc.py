"""Grouped AUC: the mean of the AUC of each user or session."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from kerasps import checks
from kerasps.metrics.examples import as_examples, check_shapes, squeezed
from kerasps.metrics.sums import SumsMetric, check_bool

_WEIGHTINGS = ("impressions", "clicks", "equal")
# 2**64 divided by the golden ratio, as a signed number: Fibonacci hashing (Knuth, The Art of
# Computer Programming, volume 3, section 6.4).
_HASH_FACTOR = 0x9E3779B97F4A7C15 - 2**64
_HASH_BITS = 31


@keras.saving.register_keras_serializable(package="kerasps")
class GroupedAUC(SumsMetric):
    """Mean of the AUC of each group, such as a user or a session, weighted by its impressions.

    It measures how well a model ranks within a group; the AUC over all examples does not. Groups in
    which all labels are the same have no AUC and are left out. The result is NaN if no group is
    left. See Zhu et al. 2017, "Optimized Cost per Click in Taobao Display Advertising".

    For each group the metric counts the examples between two thresholds, as `keras.metrics.AUC`
    does for all of them. Two predictions with no threshold between them are a tie, which counts
    half; apart from these ties the AUC is exact, however the examples of a group are spread over
    batches and workers. The state has `2 * num_groups * (thresholds - 1)` numbers, and each step
    adds to all of them: with more than some thousand groups, use the metric only in `evaluate`.

    ```python
    metric = kerasps.metrics.GroupedAUC(num_groups=2)
    metric.update_state([0, 1, 1, 0], [0.1, 0.2, 0.8, 0.9], groups=[0, 0, 1, 1])
    print(float(metric.result()))  # 0.5: the AUC of group 0 is 1, that of group 1 is 0
    ```

    `fit` and `evaluate` give a metric no groups. Give `y_true` a second column with them, or
    call `update_state` in `compute_metrics` of the model; `docs/metrics.md` shows both.

    Args:
        num_groups: the number of groups. Their ids are 0 to `num_groups - 1`.
        thresholds: the number of thresholds, from 0 to 1 at equal distances, as `num_thresholds` of
            `keras.metrics.AUC`. If most predictions are small, give a list of the thresholds
            between 0 and 1 instead, in ascending order. Default 200.
        weighting: the weight of a group: the number of its examples (`"impressions"`), of those
            with a positive label (`"clicks"`), or 1 (`"equal"`). Sample weights count in the
            first two. Default `"impressions"`.
        hash_groups: whether ids may be any integers, which are hashed into `num_groups`. Groups
            with the same hash count as one. Default False.
        from_logits: whether predictions are logits. Default False: they are probabilities.
        name: the name of the metric. Default `"grouped_auc"`.
        dtype: the dtype of the sums, `"float32"` or `"float64"`. Default `"float64"`. None:
            `keras.config.floatx()`.

    Raises:
        TypeError: `num_groups` is not an integer, `thresholds` is neither an integer nor numbers,
            or `hash_groups` or `from_logits` is not a bool.
        ValueError: `num_groups` is less than 1, `thresholds` less than 3 or not ascending between
            0 and 1, or another argument is not one of its values.
    """

    def __init__(
        self,
        num_groups: int,
        *,
        thresholds: int | Sequence[float] = 200,
        weighting: Literal["impressions", "clicks", "equal"] = "impressions",
        hash_groups: bool = False,
        from_logits: bool = False,
        name: str = "grouped_auc",
        dtype: str | None = "float64",
    ) -> None:
        super().__init__(from_logits=from_logits, name=name, dtype=dtype)
        self.num_groups = checks.count(
            "Argument `num_groups` is not a number of groups",
            num_groups,
            received=f"num_groups={num_groups!r}",
            advice="Give the number of users, for example.",
        )
        checks.choice("weighting", weighting, _WEIGHTINGS)
        self.weighting = weighting
        self.hash_groups = check_bool("hash_groups", hash_groups)
        self._inner = _inner_thresholds(thresholds)
        self.thresholds = (
            int(thresholds) if isinstance(thresholds, (int, np.integer)) else self._inner
        )
        shape = (self.num_groups, len(self._inner) + 1)
        self._positives = self._sum("positives", shape)
        self._negatives = self._sum("negatives", shape)

    def update_state(
        self,
        y_true: tf.Tensor,
        y_pred: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        groups: tf.Tensor | None = None,
    ) -> None:
        """Add a batch.

        An id that is out of range raises TensorFlow's `InvalidArgumentError`. In a function that
        XLA compiles it raises no error, and the result is NaN.

        Args:
            y_true: labels from 0 to 1, of shape `(n,)` or `(n, 1)`, or of the shape of `y_pred`.
                Without `groups`, of shape `(n, 2)`: labels, and the ids of their groups.
            y_pred: predictions, of the same shape.
            sample_weight: a weight for each example. Default None: 1 for each.
            groups: the id of the group of each example, of the shape of the labels. Default
                None: the second column of `y_true`.

        Raises:
            TypeError: the ids are not numbers.
            ValueError: the shapes do not match.
        """
        if groups is None:
            y_true, groups = _columns(self.name, y_true)
        labels, scores, weights = as_examples(self.name, y_true, y_pred, sample_weight)
        rows, known = self._rows(groups, labels)
        if self.from_logits:
            scores = ops.sigmoid(scores)
        # A prediction of NaN has no bucket, so it makes the sums of its group NaN.
        known = ops.logical_and(known, ops.logical_not(ops.isnan(scores)))
        weights = ops.where(known, weights, math.nan)
        inner = ops.convert_to_tensor(self._inner, dtype="float32")
        scores = ops.reshape(ops.cast(scores, "float32"), [-1])
        buckets = ops.searchsorted(inner, scores, side="left")
        places = ops.reshape(rows, [-1]) * (len(self._inner) + 1) + ops.cast(buckets, "int64")
        for state, values in (
            (self._positives, weights * labels),
            (self._negatives, weights * (1 - labels)),
        ):
            terms = ops.reshape(self._terms(values), [-1])
            sums = ops.segment_sum(terms, places, num_segments=math.prod(state.shape))
            state.assign_add(ops.reshape(sums, state.shape))

    def result(self) -> tf.Tensor:
        """Return the mean over groups; NaN if no group has both labels."""
        positives, negatives = map(ops.convert_to_tensor, (self._positives, self._negatives))
        below = ops.cumsum(negatives, axis=1) - negatives
        ordered = ops.sum(positives * (below + negatives / 2), axis=1)
        clicks, others = ops.sum(positives, axis=1), ops.sum(negatives, axis=1)
        pairs = clicks * others
        # Not `pairs > 0`, which would leave out a group whose sums are NaN.
        counts = ops.not_equal(pairs, 0)
        weights = {
            "impressions": clicks + others,
            "clicks": clicks,
            "equal": ops.ones_like(clicks),
        }[self.weighting]
        weights = ops.where(counts, weights, 0)
        total = ops.sum(weights)
        mean = ops.sum(weights * ordered / ops.where(counts, pairs, 1)) / total
        return ops.where(ops.any(counts), mean, math.nan)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make this metric again."""
        return {
            **super().get_config(),
            "num_groups": self.num_groups,
            "thresholds": self.thresholds,
            "weighting": self.weighting,
            "hash_groups": self.hash_groups,
        }

    def _rows(self, groups: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the row of each group in the state, and True where its id is in range."""
        groups = squeezed(ops.convert_to_tensor(groups))
        if groups.dtype.is_bool or not (groups.dtype.is_integer or groups.dtype.is_floating):
            raise TypeError(
                f"The groups of the metric `{self.name}` are not numbered. Expected: integers. "
                f"Received: {groups.dtype.name}. Use `keras.layers.StringLookup` or `Hashing`."
            )
        check_shapes(self.name, "groups", groups, labels)
        groups = ops.cast(groups, "int64")
        if self.hash_groups:
            mixed = ops.right_shift(groups * _HASH_FACTOR, 32) & (2**_HASH_BITS - 1)
            rows = ops.right_shift(mixed * self.num_groups, _HASH_BITS)
            return rows, ops.ones_like(rows, dtype="bool")
        known = ops.logical_and(groups >= 0, groups < self.num_groups)
        # Without its name, which Keras numbers: so models made in turn share step graphs.
        message = (
            "Ids of groups of a metric `GroupedAUC` are out of range. Expected: 0 to "
            f"{self.num_groups - 1}. Give a larger `num_groups`, or `hash_groups=True`. Received:"
        )
        with tf.control_dependencies([tf.debugging.Assert(ops.all(known), [message, groups], 10)]):
            return ops.clip(groups, 0, self.num_groups - 1), known


def _inner_thresholds(thresholds: int | Sequence[float]) -> list[float]:
    """Return the thresholds between 0 and 1."""
    message = (
        "Argument `thresholds` does not give thresholds. Expected: a whole number of at "
        "least 3, or numbers between 0 and 1 in ascending order. Received: "
        f"thresholds={thresholds!r}. Give a number like 200."
    )
    if isinstance(thresholds, (bool, str)):
        raise TypeError(message)
    if isinstance(thresholds, (int, np.integer)):
        if thresholds < 3:
            raise ValueError(message)
        return [i / (thresholds - 1) for i in range(1, thresholds - 1)]
    try:
        inner = [float(threshold) for threshold in thresholds]
    except (TypeError, ValueError):
        raise TypeError(message) from None
    edges = [0.0, *inner, 1.0]
    if not inner or any(not low < high for low, high in itertools.pairwise(edges)):
        raise ValueError(message)
    return inner


def _columns(name: str, y_true: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the labels and the ids of groups from the two columns of `y_true`."""
    y_true = ops.convert_to_tensor(y_true)
    if len(y_true.shape) != 2 or y_true.shape[1] != 2:
        raise ValueError(
            f"The metric `{name}` was given no groups. Expected: `groups`, or `y_true` of shape "
            f"(n, 2), with labels and ids of groups. Received: y_true.shape={y_true.shape}. "
            "Give `groups` to `update_state`, or `y_true` a second column."
        )
    return y_true[:, 0], y_true[:, 1]
