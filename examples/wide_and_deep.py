"""Wide and deep: a linear model that remembers pairs of categories, and layers that generalise.

    python examples/wide_and_deep.py              # starts a cluster on this machine
    kerasps launch examples/wide_and_deep.py      # the same, with the cluster around it

The model follows Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016.
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf

import kerasps
import ratings
from clusters import strategy

BATCH_SIZE = 128
DEEP = {"user": 16, "movie": 16, "decade": 4, "main_genre": 4}


def features(data: ratings.Ratings) -> dict[str, np.ndarray]:
    """Return the features of the deep half, the genres of a movie, and an id for the wide half.

    The genres are 0s and 1s. The id is that of (user, main genre).
    """
    crossed = data.columns["user"] * data.sizes["main_genre"] + data.columns["main_genre"]
    return {**data.inputs(*DEEP), "genres": data.genres, "user_x_genre": crossed}


def build_model(train: ratings.Ratings) -> keras.Model:
    """Build the rating as the sum of both halves."""
    ids = {name: keras.Input((), dtype="int32", name=name) for name in (*DEEP, "user_x_genre")}
    genres = keras.Input((train.genres.shape[1],), name="genres")
    crosses = keras.layers.Embedding(
        train.sizes["user"] * train.sizes["main_genre"], 1, embeddings_initializer="zeros"
    )
    wide = keras.layers.Add()([keras.layers.Dense(1)(genres), crosses(ids["user_x_genre"])])
    deep = [
        keras.layers.Embedding(train.sizes[name], width)(ids[name]) for name, width in DEEP.items()
    ]
    hidden = keras.layers.Concatenate()([*deep, genres])
    for units in (64, 32):
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    rating = keras.layers.Add()(
        [wide, keras.layers.Dense(1, bias_initializer=keras.initializers.Constant(3.5))(hidden)]
    )
    model = keras.Model({**ids, "genres": genres}, rating)
    rmse = keras.metrics.RootMeanSquaredError(name="rmse")
    model.compile(keras.optimizers.Adam(), "mse", metrics=[rmse], steps_per_execution=10)
    return model


def main() -> None:
    """Train, evaluate, print the test error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--max-steps",
        type=int,
        default=700,
        help="steps per epoch; 700 see the training ratings once",
    )
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    train, test = ratings.load()

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((features(train), train.rating))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return (
            dataset.shuffle(len(train)).repeat().batch(BATCH_SIZE, drop_remainder=True).prefetch(2)
        )

    with strategy(num_workers=2, num_ps=1) as parameter_servers:
        with parameter_servers.scope():
            model = build_model(train)
        model.fit(
            kerasps.DatasetCreator(dataset_fn),
            epochs=options.epochs,
            steps_per_epoch=options.max_steps,
        )
        result = model.evaluate(
            features(test), test.rating, batch_size=1024, verbose=0, return_dict=True
        )
    print(f"test RMSE: {result['rmse']:.4f} on {len(test):,} ratings")


if __name__ == "__main__":
    main()
