"""Trains for long on a cluster of its own and reports what its tasks hold before and after; run by
test_lasting.py.

    python tests/processes/lasting_training.py models --count 100
    python tests/processes/lasting_training.py varied --count 30
    python tests/processes/lasting_training.py calls --count 1000
    python tests/processes/lasting_training.py steps --count 1000000
    python tests/processes/lasting_training.py rows --count 20000000

Prints one JSON line: of each process, memory in MB, threads and file descriptors, at the times of
`--samples` and at the end. Of what happens `--count` times, so much comes first and is not counted:
tasks grow while they work for the first time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scenario import local_strategy, print_report

import kerasps
from support.turns import varied_data, varied_model, wait_until_gone, watch

WIDTH = 32
# The new ids of a step of `rows`.
NEW_IDS = 4000


# Threads that read data end a little after the iterator that they read for.
SETTLE_S = 60


def settled_usage(pids, before):
    """Return what each process holds, once no more threads run than `before`, or after a while."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        held = {name: usage(pid) for name, pid in pids.items()}
        grown = [name for name in held if held[name]["threads"] > before[name]["threads"]]
        if not grown or time.monotonic() > deadline:
            return held
        time.sleep(0.1)


def usage(pid):
    """Return what a process holds: MB of memory of its own, threads and file descriptors."""
    fields = dict(
        line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    return {
        "megabytes": int(fields["Anonymous"].split()[0]) / 1024,
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "files": len(os.listdir(f"/proc/{pid}/fd")),
    }


def dataset_fn(_):
    data = (
        tf.random.stateless_normal([512, WIDTH], [1, 2]),
        tf.random.stateless_normal([512, 1], [3, 4]),
    )
    return tf.data.Dataset.from_tensor_slices(data).repeat().batch(8)


def compiled_model(strategy, steps_per_execution):
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(1)])
        model.compile("adam", "mse", steps_per_execution=steps_per_execution)
    return model


class Listener(keras.callbacks.Callback):
    """Hears of each batch, so that each execution brings its results at once."""

    def on_train_batch_end(self, batch, logs=None):
        pass


def models(strategy, options, sample):
    """Models that are made, trained, evaluated and given up in turn."""
    x, y = np.ones((64, WIDTH), "float32"), np.ones((64, 1), "float32")

    def train():
        model = compiled_model(strategy, steps_per_execution=10)
        model.fit(kerasps.DatasetCreator(dataset_fn), steps_per_epoch=20, verbose=0)
        model.evaluate(x, y, batch_size=8, verbose=0)
        return watch(model)

    in_turn(train, options, sample)


def varied(strategy, options, sample):
    """Models with tables, bags, lookup layers and checks, as `models`."""
    x, y = varied_data()
    words = x["word"]

    def train():
        with strategy.scope():
            model = varied_model()
            model.compile("adam", "mse", steps_per_execution=4)
            lookup = keras.layers.StringLookup(vocabulary=sorted(set(words.ravel())))
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        model.fit(
            data.map(lambda x, y: (x, y + 0.0 * tf.cast(lookup(x["word"]), "float32"))), verbose=0
        )
        model.evaluate(x, y, batch_size=8, verbose=0)
        model.predict(x, batch_size=8, verbose=0)
        return watch(model)

    in_turn(train, options, sample)


def in_turn(train, options, sample):
    """Call `train` again and again, each time when the model before is gone."""
    for number in range(options.warm_up + options.count):
        wait_until_gone(train())
        sample(number + 1)


def calls(strategy, options, sample):
    """Every method of one model, in turn."""
    x, y = np.ones((64, WIDTH), "float32"), np.ones((64, 1), "float32")
    model = compiled_model(strategy, steps_per_execution=4)
    for number in range(options.warm_up + options.count):
        model.fit(x, y, batch_size=8, verbose=0)
        model.evaluate(x, y, batch_size=8, verbose=0)
        model.predict(x, batch_size=8, verbose=0)
        for method in (model.train_on_batch, model.test_on_batch):
            method(x, y)
        model.predict_on_batch(x)
        sample(number + 1)


def steps(strategy, options, sample):
    """One `fit` of many steps."""
    model = compiled_model(strategy, options.steps_per_execution)
    in_epoch = max(1, options.warm_up)
    epochs = 1 + options.count // in_epoch
    at_epoch_end = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: sample((epoch + 1) * in_epoch)
    )
    callbacks = [at_epoch_end, *([Listener()] if options.listen else [])]
    data = kerasps.DatasetCreator(dataset_fn)
    model.fit(data, epochs=epochs, steps_per_epoch=in_epoch, verbose=0, callbacks=callbacks)


def rows(strategy, options, sample):
    """One `fit` that meets so many different ids, with tables that keep few of them.

    One table gives up rows that were used longest ago. In the other, an id in ten comes again soon
    and gets a row.
    """
    layers = kerasps.layers
    rules = {"max_rows": options.max_rows, "eviction": layers.Eviction("lru")}
    second = layers.CountAdmission(2, max_candidates=options.max_rows)
    with strategy.scope():
        ids = keras.Input((1,), dtype="int64")
        each = layers.DynamicEmbedding(16, name="each", **rules)
        twice = layers.DynamicEmbedding(16, name="twice", admission=second, **rules)
        joined = keras.layers.Concatenate()([each(ids), twice(ids)])
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(joined)))
        model.compile("adagrad", "mse", steps_per_execution=options.steps_per_execution)

    def new_ids(context):
        # Workers have the odd ids, or the even ones.
        steps = tf.data.Dataset.counter().map(
            lambda step: 2 * (step * NEW_IDS + tf.range(NEW_IDS, dtype="int64"))
        )
        steps = steps.map(lambda ids: tf.concat([ids, ids[::10] - 20 * NEW_IDS], 0))
        first = context.input_pipeline_id
        return steps.map(lambda ids: (ids[:, None] + first, tf.ones([tf.size(ids), 1])))

    steps_of_sample = (options.warm_up + options.count) // options.samples // NEW_IDS
    figures = []

    def at_epoch_end(epoch, logs):
        figures.append([each.figures(), twice.figures()])
        print(json.dumps(figures[-1]), flush=True)
        sample((epoch + 1) * steps_of_sample * NEW_IDS)

    model.fit(
        kerasps.DatasetCreator(new_ids),
        epochs=options.samples + 1,
        steps_per_epoch=steps_of_sample,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=at_epoch_end)],
    )
    for of_each, of_twice in figures:
        for of_table in (of_each, of_twice):
            assert of_table["rows"] <= options.max_rows
            assert of_table["rows"] == of_table["inserted"] - of_table["evicted"]
            assert of_table["refused_for_room"] == 0


SCENARIOS = {scenario.__name__: scenario for scenario in (models, varied, calls, steps, rows)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument(
        "--samples", type=int, default=2, help="how often to look, besides at the beginning"
    )
    parser.add_argument("--steps-per-execution", type=int, default=10)
    parser.add_argument("--max-rows", type=int, default=1_000_000, help="of each table of `rows`")
    parser.add_argument(
        "--limit",
        type=float,
        help="MB by which a process may hold more in the second half of the samples than in "
        "the first; exit code 1 where one does",
    )
    parser.add_argument(
        "--listen", action="store_true", help="with a callback that hears of each batch"
    )
    options = parser.parse_args()
    with local_strategy(2, 1) as (cluster, strategy):
        pids = {
            f"{job} {index}": process.pid for (job, index), process in cluster.processes.items()
        }
        pids["coordinator"] = os.getpid()
        samples, start = [], time.monotonic()

        def sample(done):
            due = options.warm_up + len(samples) * options.count // options.samples
            if done >= due and len(samples) <= options.samples:
                if not samples:
                    time.sleep(1.0)  # for what the first samples are compared with
                before = (
                    samples[-1] if samples else {name: usage(pid) for name, pid in pids.items()}
                )
                times = {"done": done, "seconds": time.monotonic() - start}
                samples.append(times | settled_usage(pids, before))
                print(json.dumps(samples[-1]), flush=True)

        SCENARIOS[options.scenario](strategy, options, sample)
        print_report({"samples": samples, "seconds": time.monotonic() - start})
    half = (len(samples) + 1) // 2
    grown = {name: peak(samples[half:], name) - peak(samples[:half], name) for name in pids}
    return int(options.limit is not None and max(grown.values()) > options.limit)


def peak(samples, name):
    """Return the most memory that a process has in some samples."""
    return max(sample[name]["megabytes"] for sample in samples)


if __name__ == "__main__":
    sys.exit(main())
