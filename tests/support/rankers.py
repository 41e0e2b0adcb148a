"""A model that ranks impressions, compiled with the metrics of recommenders."""

from __future__ import annotations

import keras
import numpy as np

from kerasps.metrics import Calibration, GroupedAUC, NormalizedEntropy

NUM_USERS = 50
# Its metrics; those of `weighted_metrics` with sample weights.
NAMES = [
    *("grouped_auc", "by_hash", "normalized_entropy", "calibration"),
    *("weighted_entropy", "weighted_calibration"),
]


class Ranker(keras.Model):
    """Knows the user of each example; so it can give `GroupedAUC` groups."""

    def __init__(self, num_groups=NUM_USERS):
        super().__init__()
        self.table = keras.layers.Embedding(NUM_USERS, 4, keras.initializers.RandomNormal(seed=1))
        self.dense = keras.layers.Dense(
            1, "sigmoid", kernel_initializer=keras.initializers.GlorotNormal(seed=2)
        )
        self.grouped_auc = GroupedAUC(num_groups)
        self.by_hash = GroupedAUC(20, hash_groups=True, weighting="clicks", name="by_hash")

    def call(self, x):
        return self.dense(keras.ops.concatenate([self.table(x["user"]), x["score"]], -1))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.grouped_auc.update_state(y, y_pred, sample_weight, groups=x["user"])
        self.by_hash.update_state(y, y_pred, groups=x["user"])
        return super().compute_metrics(x, y, y_pred, sample_weight)


def compiled_ranker(*, learning_rate=0.1, num_groups=NUM_USERS, **compile_arguments):
    model = Ranker(num_groups)
    model.compile(
        keras.optimizers.SGD(learning_rate),
        "binary_crossentropy",
        metrics=[NormalizedEntropy(), Calibration()],
        weighted_metrics=[
            NormalizedEntropy(name="weighted_entropy"),
            Calibration(name="weighted_calibration"),
        ],
        **compile_arguments,
    )
    return model


def impressions(num_examples):
    """Features, labels and sample weights of impressions."""
    generator = np.random.default_rng(0)
    # No user comes twice in a batch of 8: plain Keras would apply the two gradients one by one.
    batches = [generator.permutation(NUM_USERS)[:8] for _ in range(num_examples // 8 + 1)]
    users = np.concatenate(batches)[:num_examples]
    scores = generator.normal(size=(num_examples, 1)).astype("float32")
    rates = 1 / (1 + np.exp(1 - scores[:, 0] - users / NUM_USERS))
    labels = (generator.random(num_examples) < rates).astype("float32")
    weights = generator.uniform(0.1, 3, num_examples).astype("float32")
    # Someone who never clicks, and whom the mean leaves out.
    labels[users == 3] = 0
    return {"user": users, "score": scores}, labels, weights
