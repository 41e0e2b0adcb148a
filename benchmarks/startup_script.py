"""Trains a model for two epochs of one step, and prints when each phase of the start ended.

With ps, tf_keras takes no callback with batch methods, so the end of the first step is that of an
epoch of one step, with its metrics.

`startup.py` runs it: directly for plain Keras, under `kerasps launch` for the others. Each peer
imports only its framework, within the phase that counts the import.
"""

from __future__ import annotations

import time

_BEGAN = time.time()

import argparse  # noqa: E402
import cProfile  # noqa: E402
import functools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

STEPS_FOR_ALL = 6
NUM_BLOCKS, NUM_TABLES, ROWS, COLUMNS = 12, 40, 1000, 16


class Clock:
    """The times at which phases ended, by name, in seconds since the epoch."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {"process": _BEGAN}

    def note(self, phase: str) -> None:
        self.times.setdefault(phase, time.time())


def _tables(keras: Any) -> Any:
    layers = keras.layers
    ids = [layers.Input((), dtype="int32") for _ in range(NUM_TABLES)]
    vectors = [layers.Embedding(ROWS, COLUMNS)(feature) for feature in ids]
    return keras.Model(ids, layers.Dense(1)(layers.Concatenate()(vectors)))


def _tables_data() -> Any:
    import numpy as np

    generator = np.random.default_rng(0)
    ids = tuple(generator.integers(0, ROWS, 8192).astype("int32") for _ in range(NUM_TABLES))
    return ids, np.sin(sum(ids))[:, None].astype("float32")


def find(name: str) -> Any:
    """Return the `Benchmark` of this name."""
    from models import BENCHMARKS, Benchmark, build_transformer, transformer_data

    if name == "transformer12":
        build = functools.partial(build_transformer, num_blocks=NUM_BLOCKS)
        return Benchmark(build, transformer_data, "sparse_categorical_crossentropy", 8, 50)
    if name == "tables40":
        return Benchmark(_tables, _tables_data, "mse", 128, 50, "Adagrad")
    return BENCHMARKS[name]


MODELS = ("mlp2", "movielens", "transformer12", "tables40")


def _framework(peer: str, clock: Clock) -> tuple[Any, Any, Any]:
    """Import a peer's framework; return its Keras, a scope and a wrapper of a `dataset_fn`."""
    import contextlib

    import tensorflow as tf

    if peer == "tf_keras":
        import tf_keras as keras

        clock.note("imports")
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        scope = tf.distribute.ParameterServerStrategy(resolver).scope()
        wrap: Callable[[Any], Any] = keras.utils.experimental.DatasetCreator
    elif peer == "kerasps":
        import keras

        import kerasps

        strategy_class, wrap = kerasps.ParameterServerStrategy, kerasps.DatasetCreator
        clock.note("imports")
        scope = strategy_class().scope()
    else:
        import keras

        clock.note("imports")
        scope, wrap = contextlib.nullcontext(), lambda function: function(None)
    clock.note("connect")
    return keras, scope, wrap


def _noting(keras: Any, clock: Clock, name: str) -> Any:
    """Return a callback that records the begins and ends of epochs of the call `name`."""

    class Noting(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            clock.note(f"{name}, epoch {epoch} begins")

        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            clock.note(f"{name}, epoch {epoch}")

        def on_test_end(self, logs: object = None) -> None:
            clock.note(f"{name}, epoch 0")

    return Noting()


def _calls(model: Any, data: Any, keras: Any, clock: Clock, profiles: str | None) -> None:
    """Call `fit` and `evaluate` once, so often that every worker has done steps, and again."""

    def fit(callback: Any = None, steps: int = 1) -> None:
        callbacks = [] if callback is None else [callback]
        model.fit(data, epochs=2, steps_per_epoch=steps, verbose=0, callbacks=callbacks)

    def evaluate(callback: Any = None, steps: int = 1) -> None:
        callbacks = [] if callback is None else [callback]
        model.evaluate(data, steps=steps, verbose=0, callbacks=callbacks)

    calls: list[tuple[str, Any]] = [("fit", fit), ("second fit", fit)]
    calls += [("evaluate", evaluate), ("second evaluate", evaluate), ("third fit", fit)]
    for name, call in calls:
        if name.startswith("second"):
            # A worker makes its step ready when it does its first.
            call(steps=STEPS_FOR_ALL)
        clock.note(f"{name} is called")
        profile = cProfile.Profile() if profiles else None
        if profile is not None:
            profile.enable()
        call(_noting(keras, clock, name))
        if profile is not None:
            profile.disable()
            profile.dump_stats(os.path.join(str(profiles), f"{name}.prof"))


def main() -> None:
    """Train, and print the times as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=("plain", "tf_keras", "kerasps"))
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--profiles", help="directory for a profile of each call, by cProfile")
    options = parser.parse_args()
    clock = Clock()
    keras, scope, wrap = _framework(options.peer, clock)

    import tensorflow as tf

    benchmark = find(options.model)
    x, y = benchmark.data()
    clock.note("data")

    def dataset_fn(context: object) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat()
        return dataset.batch(benchmark.batch_size, drop_remainder=True).prefetch(4)

    with scope:
        model = benchmark.build(keras)
        model.compile(getattr(keras.optimizers, benchmark.optimizer)(), benchmark.loss)
    clock.note("model")
    _calls(model, wrap(dataset_fn), keras, clock, options.profiles)
    print(json.dumps(clock.times), flush=True)


if __name__ == "__main__":
    main()
