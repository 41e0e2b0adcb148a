"""Calls the methods of two models while workers are killed and restarted at random; `tox -e chaos`
runs it.

    python tests/processes/killed_at_random.py --seconds 600 --seed 3

Whatever is killed when, each call visits every example once. Prints each call that did not, or that
failed, and exits with 1 then.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
import traceback

import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps

NUM_EXAMPLES, BATCH_SIZE, EPOCHS = 1603, 4, 2
IDS = np.arange(float(NUM_EXAMPLES))
X, Y = (IDS / NUM_EXAMPLES).astype("float32")[:, None], IDS.astype("float32")[:, None]


class SumOfPowers(keras.metrics.Metric):
    """Adds up the targets, each to a power."""

    def __init__(self, name, power):
        super().__init__(name=name, dtype="float64")
        self._power = power
        self._total = self.add_weight(shape=(), initializer="zeros", dtype="float64", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self._total.assign_add(tf.reduce_sum(tf.cast(y_true, "float64") ** self._power))

    def result(self):
        return self._total


def compiled_model(strategy, steps_per_execution):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        metrics = [SumOfPowers("ids", 1), SumOfPowers("squares", 2)]
        model.compile(
            keras.optimizers.Adam(1e-6),
            "mse",
            metrics=metrics,
            steps_per_execution=steps_per_execution,
        )
    return model


def arrays():
    return {"x": X, "y": Y, "batch_size": BATCH_SIZE}


def shuffled_dataset():
    return {"x": tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100).batch(BATCH_SIZE)}


def dataset_of_unknown_length():
    return {
        "x": tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda *_: True).batch(BATCH_SIZE)
    }


def is_exact(logs):
    return logs["ids"] == IDS.sum() and logs["squares"] == (IDS**2).sum()


def fit(model, data):
    before = int(model.optimizer.iterations)
    history = model.fit(**data, epochs=EPOCHS, verbose=0).history
    steps = int(model.optimizer.iterations) - before
    epochs = [{name: values[epoch] for name, values in history.items()} for epoch in range(EPOCHS)]
    return all(is_exact(logs) for logs in epochs) and steps == EPOCHS * -(
        -NUM_EXAMPLES // BATCH_SIZE
    ), (epochs, steps)


def evaluate(model, data):
    logs = model.evaluate(**data, verbose=0, return_dict=True)
    return is_exact(logs), logs


def predict(model, data):
    rows = model.predict(**{name: value for name, value in data.items() if name != "y"}, verbose=0)
    return rows.shape == (NUM_EXAMPLES, 1), rows.shape


class Killer(threading.Thread):
    """Kills workers and starts them again, at random times.

    Args:
        cluster: the `LocalCluster`.
        chance: a `random.Random`.
        most_between: seconds between two kills at most.
        most_away: seconds that a worker is away at most; half of them come back at once.
    """

    def __init__(self, cluster, chance, *, most_between=4, most_away=2):
        super().__init__(daemon=True)
        self._cluster = cluster
        self._chance = chance
        self._most_between, self._most_away = most_between, most_away
        self.is_over = threading.Event()
        self.kills = 0

    def run(self):
        while not self.is_over.wait(self._chance.uniform(0.05, self._most_between)):
            worker = self._chance.randrange(2)
            self._cluster.kill("worker", worker)
            self.kills += 1
            time.sleep(self._chance.choice([0, self._chance.uniform(0, self._most_away)]))
            self._cluster.restart("worker", worker)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    wrong, calls = [], 0
    with kerasps.LocalCluster(num_workers=2, num_ps=2) as cluster:
        partitioner = kerasps.FixedShardsPartitioner(2)
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver, variable_partitioner=partitioner
        )
        models = [compiled_model(strategy, steps_per_execution) for steps_per_execution in (1, 5)]
        killer = Killer(cluster, random.Random(options.seed + 1))
        killer.start()
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            method = chance.choice([fit, evaluate, predict])
            data = chance.choice([arrays, shuffled_dataset, dataset_of_unknown_length])
            calls += 1
            try:
                is_right, result = method(chance.choice(models), data())
            except Exception:
                is_right, result = False, traceback.format_exc()
            if not is_right:
                wrong.append(
                    f"{method.__name__} of {data.__name__}, call {calls}, after {killer.kills} "
                    f"kills: {result}"
                )
                print(wrong[-1], flush=True)
        killer.is_over.set()
        killer.join()
    print_report({"calls": calls, "kills": killer.kills, "wrong": wrong})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
