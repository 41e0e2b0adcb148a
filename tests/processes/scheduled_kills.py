"""Schedules functions while workers are killed and restarted at random, and looks what the ps have
applied; run as a process of its own by test_scheduled.py.

    python tests/processes/scheduled_kills.py --kills 20 --seed 3 --kind looped

With a gradient of 1 and a learning rate of 1, a weight is minus the number of its updates, and a
row of the table minus the number of times that its example was trained on. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import random

import keras
import numpy as np
import tensorflow as tf
from scenario import Killer, local_strategy, print_report

from support.unit_gradients import Ids, Outputs, unit_model

NUM_EXAMPLES, BATCH_SIZE, CALLS = 400, 4, 60
IDS = np.arange(NUM_EXAMPLES, dtype="int32")[:, None]


def two_shards_unless_large(shape, dtype):
    # The table is whole: a call that was applied on one ps alone is finished with the batch of the
    # call that is made again, which may have more rows, or fewer, of another shard.
    return [2 if 1 < shape[0] < NUM_EXAMPLES else 1, *(1 for _ in shape[1:])] if shape else []


def dataset_fn():
    dataset = tf.data.Dataset.from_tensor_slices((IDS, IDS))
    return dataset.shuffle(NUM_EXAMPLES).repeat().batch(BATCH_SIZE)


def make_function(kind):
    """Return a function to schedule, its parts, and how many steps a call of it does."""
    with strategy.scope():
        model = unit_model(NUM_EXAMPLES)
        optimizer, metric = keras.optimizers.SGD(1.0), Ids()
    loss_fn = Outputs(reduction="sum")

    def train(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(y, loss)
        return tf.size(y)

    if kind == "single":

        @tf.function
        def function(iterator):
            return strategy.run(train, args=next(iterator))
    elif kind == "whole":

        @tf.function
        def function(iterator):
            return train(*next(iterator))
    else:

        @tf.function
        def function(iterator):
            total = strategy.run(train, args=next(iterator))
            for _ in tf.range(4):
                total += strategy.run(train, args=next(iterator))
            return total

    return function, model, optimizer, metric, 5 if kind == "looped" else 1


parser = argparse.ArgumentParser()
parser.add_argument("--kills", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--kind", choices=("single", "whole", "looped"), default="single")
options = parser.parse_args()
report = {"problems": [], "rounds": 0, "kills": 0}
with local_strategy(partitioner=two_shards_unless_large, table_min_bytes=0) as (cluster, strategy):
    coordinator = strategy.coordinator
    function, model, optimizer, metric, steps = make_function(options.kind)
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    killer = Killer(cluster, random.Random(options.seed + 1), most_between=2, most_away=1.5)
    killer.start()
    total = 0
    while killer.kills < options.kills and not report["problems"]:
        metric.reset_state()
        results = [coordinator.schedule(function, args=(iterator,)) for _ in range(CALLS)]
        coordinator.join()
        total += CALLS * steps
        report["rounds"] += 1
        table, *weights = (variable.numpy() for variable in model.trainable_variables)
        logs = {name: int(value) for name, value in metric.result().items()}
        wanted = {
            "iterations": (int(optimizer.iterations.numpy()), total),
            "rows": (-int(table.sum()), total * BATCH_SIZE),
            "batches": (logs["batches"], CALLS * steps),
            "examples": (logs["examples"], CALLS * steps * BATCH_SIZE),
            "returned": (
                sum(int(result.fetch()) for result in results),
                CALLS * steps * BATCH_SIZE,
            ),
        }
        wanted.update(
            (f"weight {index}", (sorted(set((-weight).ravel().tolist())), [float(total)]))
            for index, weight in enumerate(weights)
        )
        report["problems"] += [
            f"kills {killer.kills}: {name} {got}, not {expected}"
            for name, (got, expected) in wanted.items()
            if got != expected
        ]
    killer.is_over.set()
    killer.join()
    report["kills"] = killer.kills
    print_report(report)
