"""Predicts movie ratings from embeddings, trained by two workers that share one parameter server.

python examples/movielens.py                  # starts a cluster on this machine
kerasps launch examples/movielens.py          # the same, with the cluster around it
kerasps launch --mode worker examples/movielens.py    # without a coordinator: each worker runs it
python examples/movielens.py --plain          # the same model and number of steps in one
                                              # plain Keras process
"""

from __future__ import annotations

import argparse
import time

import keras
import tensorflow as tf

import kerasps
import ratings
from clusters import strategy

BATCH_SIZE = 128
STEPS_PER_EXECUTION = 10


def build_model(train: ratings.Ratings, dimension: int = 32) -> keras.Model:
    """Build mean rating + user bias + movie bias + match of the vectors of the two."""
    # A penalty on the rows in use. A penalty on the table would read all of it in every step.
    penalty = keras.regularizers.L2(0.05)
    ids = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "movie")}
    vectors = [
        keras.layers.Embedding(train.sizes[name], dimension, activity_regularizer=penalty)(
            ids[name]
        )
        for name in ids
    ]
    biases = [
        keras.layers.Embedding(train.sizes[name], 1, embeddings_initializer="zeros")(ids[name])
        for name in ids
    ]
    rating = keras.layers.Add()([keras.layers.Dot(axes=1)(vectors), *biases])
    model = keras.Model(ids, keras.layers.Rescaling(1.0, offset=float(train.rating.mean()))(rating))
    rmse = keras.metrics.RootMeanSquaredError(name="rmse")
    model.compile(
        keras.optimizers.Adam(0.002), "mse", metrics=[rmse], steps_per_execution=STEPS_PER_EXECUTION
    )
    return model


def main() -> None:
    """Train, evaluate, print the test error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--max-steps", type=int, help="steps per epoch; default: once through the training ratings"
    )
    parser.add_argument(
        "--plain", action="store_true", help="train in this process, without a cluster"
    )
    options = parser.parse_args()

    keras.utils.set_random_seed(1)
    train, test = ratings.load()
    # Only whole executions, so that an epoch has the same number of steps everywhere.
    steps = (
        (options.max_steps or len(train) // BATCH_SIZE) // STEPS_PER_EXECUTION * STEPS_PER_EXECUTION
    )

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((train.inputs("user", "movie"), train.rating))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        dataset = dataset.shuffle(len(train), seed=context.input_pipeline_id).repeat()
        return dataset.batch(BATCH_SIZE, drop_remainder=True).prefetch(2)

    def run(model: keras.Model, data: object, steps: int) -> None:
        start = time.perf_counter()
        model.fit(data, epochs=options.epochs, steps_per_epoch=steps)
        seconds = time.perf_counter() - start
        result = model.evaluate(
            test.inputs("user", "movie"), test.rating, batch_size=1024, verbose=0, return_dict=True
        )
        print(f"{int(model.optimizer.iterations) * BATCH_SIZE:,} examples in {seconds:.1f} s")
        print(f"test RMSE: {result['rmse']:.4f} on {len(test):,} ratings")

    if options.plain:
        run(build_model(train), dataset_fn(tf.distribute.InputContext()), steps)
    else:
        with strategy(num_workers=2, num_ps=1) as parameter_servers:
            with parameter_servers.scope():
                model = build_model(train)
            if isinstance(parameter_servers, kerasps.WorkerDrivenStrategy):
                steps //= parameter_servers.num_workers  # each calls `fit` for its share
            run(model, kerasps.DatasetCreator(dataset_fn), steps)


if __name__ == "__main__":
    main()
