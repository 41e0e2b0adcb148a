"""Trains one model in one configuration, times whole epochs of `fit`, and prints one line of JSON.

`run.py` starts one process of this script per measurement, with TF_CONFIG set if there are workers.
The process imports only the framework that it measures.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tensorflow as tf

from gpu_models import GPU_BENCHMARKS
from models import MODELS, Benchmark, find

NETWORK = Path("/proc/net/dev")


def dataset_function(benchmark: Benchmark) -> Any:
    """Return the `dataset_fn` of all peers: each worker reads its split repeatedly."""
    x, y = benchmark.data()

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.repeat().batch(benchmark.batch_size, drop_remainder=True).prefetch(4)

    return dataset_fn


def loopback_bytes() -> int:
    """Return the bytes that this machine's loopback interface has received since it started.

    They include those of every program, and TCP's headers.
    """
    for line in NETWORK.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError(f"{NETWORK} must have a line for the interface `lo`. Received: none.")


def epoch_clock(keras: Any) -> Any:
    """Return a callback that records the time and the loopback's bytes around epochs.

    It does so when training starts and when each epoch ends, so it includes the time between.
    """

    class EpochClock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []
            self.bytes: list[int] = []

        def _note(self) -> None:
            self.times.append(time.perf_counter())
            self.bytes.append(loopback_bytes() if NETWORK.exists() else 0)

        def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
            self._note()

        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            self._note()

    return EpochClock()


def build(keras: Any, benchmark: Benchmark, options: argparse.Namespace) -> Any:
    """Build and compile the model."""
    keras.utils.set_random_seed(1)
    model = benchmark.build(keras)
    optimizer = getattr(keras.optimizers, benchmark.optimizer)()
    model.compile(optimizer, benchmark.loss, steps_per_execution=options.steps_per_execution)
    return model


def prepare_plain(benchmark: Benchmark, options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Prepare Keras 3 in this process: the module, the model, and the data."""
    import keras

    return (
        keras,
        build(keras, benchmark, options),
        dataset_function(benchmark)(tf.distribute.InputContext()),
    )


def prepare_tf_keras(benchmark: Benchmark, options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Prepare Keras 2 with its support for parameter servers."""
    import tf_keras

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    partitioner = None
    if options.shards > 1:
        partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(options.shards)
    with tf.distribute.ParameterServerStrategy(resolver, partitioner).scope():
        model = build(tf_keras, benchmark, options)
    return tf_keras, model, tf_keras.utils.experimental.DatasetCreator(dataset_function(benchmark))


def prepare_kerasps(benchmark: Benchmark, options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Prepare Keras 3 with kerasps."""
    import keras

    import kerasps

    partitioner = kerasps.FixedShardsPartitioner(options.shards) if options.shards > 1 else None
    arguments = {"sparse_updates": options.sparse_updates} if options.sparse_updates else {}
    arguments["overlap"] = options.overlap
    with kerasps.ParameterServerStrategy(None, partitioner, **arguments).scope():
        model = build(keras, benchmark, options)
    return keras, model, kerasps.DatasetCreator(dataset_function(benchmark))


PREPARE = {"plain": prepare_plain, "tf_keras": prepare_tf_keras, "kerasps": prepare_kerasps}


def main() -> None:
    """Measure, and print the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=PREPARE)
    parser.add_argument("model", choices=(*MODELS, *GPU_BENCHMARKS))
    parser.add_argument("--steps-per-execution", type=int, default=1)
    parser.add_argument(
        "--epochs", type=int, default=3, help="how many epochs are timed, after one that is not"
    )
    parser.add_argument("--steps-per-epoch", type=int, help="default: the model's own")
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="rows of the (largest) table of a model"
    )
    parser.add_argument(
        "--used-rows",
        type=int,
        help="how many of them, evenly spread, the data look up; default: all",
    )
    parser.add_argument(
        "--shards", type=int, default=1, help="shards of each variable that can be split"
    )
    parser.add_argument(
        "--sparse-updates",
        choices=("lazy", "dense"),
        help="kerasps's argument; default: its default",
    )
    parser.add_argument("--overlap", action="store_true", help="kerasps's argument")
    options = parser.parse_args()

    benchmark = GPU_BENCHMARKS.get(options.model) or find(
        options.model, options.rows, options.used_rows
    )
    keras, model, data = PREPARE[options.peer](benchmark, options)
    clock = epoch_clock(keras)
    steps = options.steps_per_epoch or benchmark.steps_per_epoch
    # The first epoch traces and compiles.
    epochs = options.epochs + 1
    history = model.fit(data, epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=[clock])
    result = {
        "keras": version("tf_keras" if options.peer == "tf_keras" else "keras"),
        "tensorflow": version("tensorflow"),
        "milliseconds_per_step": [
            1000 * (end - start) / steps
            for start, end in zip(clock.times[1:], clock.times[2:], strict=False)
        ],
        "bytes_per_step": [
            (end - start) / steps
            for start, end in zip(clock.bytes[1:], clock.bytes[2:], strict=False)
        ],
        "steps": epochs * steps,
        "counted_steps": int(model.optimizer.iterations),
        "loss": [float(history.history["loss"][0]), float(history.history["loss"][-1])],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
