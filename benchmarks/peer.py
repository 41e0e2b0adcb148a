"""Trains one model in one configuration, times whole epochs of `fit`, and prints one line of JSON.

`run.py` starts one process of this script per measurement, with TF_CONFIG set where there are workers. Only the framework that
is measured is imported.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from typing import Any

import tensorflow as tf

from models import BENCHMARKS


def dataset_function(name: str) -> Any:
    """The `dataset_fn` that every peer uses: each worker reads its part of the data, again and again."""
    benchmark = BENCHMARKS[name]
    x, y = benchmark.data()

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.repeat().batch(benchmark.batch_size, drop_remainder=True).prefetch(4)

    return dataset_fn


def epoch_clock(keras: Any) -> Any:
    """A callback whose `times` are the start of training and the end of each epoch, so nothing between epochs is left out."""

    class EpochClock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
            self.times.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            self.times.append(time.perf_counter())

    return EpochClock()


def build(keras: Any, name: str, steps_per_execution: int) -> Any:
    """Builds and compiles a model of `BENCHMARKS`."""
    keras.utils.set_random_seed(1)
    model = BENCHMARKS[name].build(keras)
    model.compile(keras.optimizers.Adam(), BENCHMARKS[name].loss, steps_per_execution=steps_per_execution)
    return model


def prepare_plain(name: str, steps_per_execution: int) -> tuple[Any, Any, Any]:
    """Keras 3 in this process: the module, the model, and the data."""
    import keras

    return keras, build(keras, name, steps_per_execution), dataset_function(name)(tf.distribute.InputContext())


def prepare_tf_keras(name: str, steps_per_execution: int) -> tuple[Any, Any, Any]:
    """Keras 2 with its own support for parameter servers."""
    import tf_keras

    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    with strategy.scope():
        model = build(tf_keras, name, steps_per_execution)
    return tf_keras, model, tf_keras.utils.experimental.DatasetCreator(dataset_function(name))


def prepare_kerasps(name: str, steps_per_execution: int) -> tuple[Any, Any, Any]:
    """Keras 3 with kerasps."""
    import keras

    import kerasps

    with kerasps.ParameterServerStrategy().scope():
        model = build(keras, name, steps_per_execution)
    return keras, model, kerasps.DatasetCreator(dataset_function(name))


PREPARE = {"plain": prepare_plain, "tf_keras": prepare_tf_keras, "kerasps": prepare_kerasps}


def main() -> None:
    """Measures, and prints what it measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PREPARE)
    parser.add_argument("model", choices=BENCHMARKS)
    parser.add_argument("--steps-per-execution", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3, help="how many epochs are timed, after one that is not")
    options = parser.parse_args()

    keras, model, data = PREPARE[options.peer](options.model, options.steps_per_execution)
    clock = epoch_clock(keras)
    steps = BENCHMARKS[options.model].steps_per_epoch
    # The first epoch traces and compiles.
    epochs = options.epochs + 1
    history = model.fit(data, epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=[clock])
    result = {
        "keras": version("tf_keras" if options.peer == "tf_keras" else "keras"),
        "tensorflow": version("tensorflow"),
        "milliseconds_per_step": [
            1000 * (end - start) / steps for start, end in zip(clock.times[1:], clock.times[2:], strict=False)
        ],
        "steps": epochs * steps,
        "counted_steps": int(model.optimizer.iterations),
        "loss": [float(history.history["loss"][0]), float(history.history["loss"][-1])],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
