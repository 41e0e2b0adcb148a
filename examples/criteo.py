"""Synthetic clicks in the shape of the Criteo data.

There are 13 counts, 26 categories of very unequal sizes, and a label from a hidden model.
TensorFlow draws the random numbers, so a worker can make batches without reading data, and a batch
depends only on its seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

NUM_COUNTS = 13
# Distinct values of the 26 categorical columns of Criteo's Kaggle data, 33.8 million in all.
CARDINALITIES = np.array(
    [
        [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194],
        [27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572],
    ]
).ravel()
# Workers count their seeds from 0, so no worker uses this one.
TEST_SEED = 1_000_000


def table_sizes(total: int) -> np.ndarray:
    """Return the sizes of Criteo's 26 vocabularies, scaled to `total` rows and at least 3 each.

    `total` is 1,000 or more.
    """
    sizes = np.maximum(CARDINALITIES * total // CARDINALITIES.sum(), 3)
    sizes[sizes.argmax()] += total - sizes.sum()
    return sizes


@dataclass(frozen=True)
class Clicks:
    """The source of the examples, with the sizes of tables and batches."""

    sizes: np.ndarray
    batch_size: int

    def batch(
        self, seed: int, index: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor, tf.Tensor]:
        """Return features, labels (0 or 1), and the hidden model's probabilities of a 1."""
        normal = tf.random.stateless_normal((self.batch_size, NUM_COUNTS), [seed, 2 * index])
        uniform = tf.random.stateless_uniform(
            (self.batch_size, len(self.sizes) + 1), [seed, 2 * index + 1], dtype=tf.float64
        )
        # A power law: of n rows, id k has the share log((k + 2) / (k + 1)) / log(n + 1). Id 0 is
        # the hottest.
        ids = tf.cast(tf.cast(self.sizes + 1, tf.float64) ** uniform[:, :-1], tf.int32) - 1
        ids = tf.minimum(ids, tf.cast(self.sizes - 1, tf.int32))
        probability = tf.sigmoid(_score(normal, tf.cast(ids, tf.float32)))
        label = tf.cast(tf.cast(uniform[:, -1], tf.float32) < probability, tf.float32)
        return {"counts": tf.exp(normal), "categories": ids}, label, probability

    def dataset(self, seed: int) -> tf.data.Dataset:
        """Return batches of features and labels, without end."""
        return tf.data.Dataset.counter().map(lambda index: self.batch(seed, index)[:2]).prefetch(4)

    def reference_aucs(self, num_batches: int) -> tuple[float, float]:
        """Return the AUC of a constant guess and of the hidden model on the first test batches.

        No model can be much better than the hidden one.
        """
        constant, hidden = keras.metrics.AUC(), keras.metrics.AUC()
        for index in tf.range(num_batches, dtype=tf.int64):
            _, label, probability = self.batch(TEST_SEED, index)
            constant.update_state(label, tf.fill(label.shape, 0.5))
            hidden.update_state(label, probability)
        return float(constant.result()), float(hidden.result())


def _score(normal: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Score examples by the hidden model.

    It has a weight for each count, an effect of each category, and effects of pairs of categories.
    """
    generator = np.random.default_rng(7)
    weights = generator.normal(0.0, 0.2, NUM_COUNTS).astype("float32")
    frequencies, phases = generator.uniform(0.5, 3.0, (2, 2, len(CARDINALITIES))).astype("float32")
    # The sine of an id times an odd number: it serves as a random number for each id, without a
    # table.
    effects = tf.sin(ids[:, None] * frequencies + phases)
    pairs = effects[:, 1] * tf.roll(effects[:, 1], 1, axis=1)
    return (
        -1.0
        + tf.linalg.matvec(normal, weights)
        + 0.3 * tf.reduce_sum(effects[:, 0] + pairs, axis=1)
    )
