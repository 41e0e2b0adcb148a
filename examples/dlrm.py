"""A recommendation model with 26 embedding tables of 4 million rows in all, on two ps.

    python examples/dlrm.py                                         # starts a cluster here
    python examples/dlrm.py --vocabulary-size 100000 --steps 200    # smaller

The model follows Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems", 2019.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf

import criteo
import kerasps
from clusters import strategy

EMBEDDING_WIDTH = 16


def build_model(sizes: np.ndarray) -> keras.Model:
    """Build one vector for the counts, one for each category, and the match of each pair."""
    counts = keras.Input((criteo.NUM_COUNTS,), name="counts")
    categories = keras.Input((len(sizes),), dtype="int32", name="categories")
    bottom = [keras.layers.Dense(units, activation="relu") for units in (64, EMBEDDING_WIDTH)]
    top = [keras.layers.Dense(units, activation="relu") for units in (128, 64)]
    dense = keras.Sequential(bottom)(keras.ops.log1p(counts))
    rows = [
        keras.layers.Embedding(int(size), EMBEDDING_WIDTH)(categories[:, i])
        for i, size in enumerate(sizes)
    ]
    vectors = keras.ops.stack([dense, *rows], axis=1)
    matches = keras.layers.Flatten()(keras.layers.Dot(axes=2)([vectors, vectors]))
    # Each pair once: the part of the 27 x 27 matches below the diagonal.
    pairs = keras.ops.take(matches, np.flatnonzero(np.tri(len(sizes) + 1, k=-1)), axis=1)
    click = keras.Sequential([*top, keras.layers.Dense(1, activation="sigmoid")])
    return keras.Model(
        {"counts": counts, "categories": categories},
        click(keras.layers.Concatenate()([dense, pairs])),
    )


def main() -> None:
    """Train, evaluate, print the placement of the tables and the test AUC."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vocabulary-size", type=int, default=4_000_000, help="rows of the 26 tables together"
    )
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=1000, help="steps per epoch, of all workers together"
    )
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--test-batches", type=int, default=40)
    parser.add_argument("--steps-per-execution", type=int, default=10)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-ps", type=int, default=2)
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    clicks = criteo.Clicks(criteo.table_sizes(options.vocabulary_size), options.batch_size)

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return clicks.dataset(seed=context.input_pipeline_id)

    with strategy(
        options.num_workers, options.num_ps, kerasps.MinSizePartitioner()
    ) as parameter_servers:
        with parameter_servers.scope():
            model = build_model(clicks.sizes)
            optimizer = keras.optimizers.get(options.optimizer)
            optimizer.learning_rate = options.learning_rate
            settings = {"steps_per_execution": options.steps_per_execution}
            auc = keras.metrics.AUC(name="auc")
            model.compile(optimizer, "binary_crossentropy", metrics=[auc], **settings)
        model.fit(
            kerasps.DatasetCreator(dataset_fn), epochs=options.epochs, steps_per_epoch=options.steps
        )
        test = clicks.dataset(seed=criteo.TEST_SEED).take(options.test_batches)
        result = model.evaluate(test, verbose=0, return_dict=True)
        print(parameter_servers.placement())
        print(parameter_servers.load_report())
    constant, hidden = clicks.reference_aucs(options.test_batches)
    print(
        f"test AUC: {result['auc']:.4f} on {options.test_batches * options.batch_size:,} examples"
    )
    print(
        f"the AUC of a constant guess: {constant:.4f}, of the hidden model that drew the labels: "
        f"{hidden:.4f}"
    )


if __name__ == "__main__":
    main()
