"""Trains while workers are killed and restarted at random, and looks what the ps have applied; run
as a process of its own by test_applied_once.py.

    python tests/processes/applied_once.py --kills 20 --seed 3
    python tests/processes/applied_once.py --arguments '{"max_staleness": 3}'
    python tests/processes/applied_once.py --table-min-bytes 512

The last has all of a model lie on one ps while steps are in flight; else it is on both.

With a gradient of 1 and a learning rate of 1, a weight is minus the number of its updates, and a
row of the table minus the number of times that its example was trained on. Adagrad's slots count
too. Prints one JSON line: how many kills there were, and what was wrong after them.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import random
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from killed_at_random import Killer

import kerasps
from kerasps.step.updates import compiled

# `tests` is on the path of pytest, and not of a script.
sys.path.append(str(Path(__file__).parents[1]))
from support.spread import spread
from support.unit_gradients import (
    Listening,
    compiled_unit_model,
    endless,
    of_unknown_length,
)

NUM_EXAMPLES, BATCH_SIZE = 1200, 4
STEPS = NUM_EXAMPLES // BATCH_SIZE
IDS = np.arange(NUM_EXAMPLES, dtype="int32")[:, None]


DATA = {
    "endless": lambda: {
        "x": kerasps.DatasetCreator(endless(IDS, BATCH_SIZE)),
        "steps_per_epoch": STEPS,
    },
    "arrays": lambda: {"x": IDS, "y": IDS, "batch_size": BATCH_SIZE},
    "unknown": lambda: {"x": of_unknown_length(IDS, BATCH_SIZE)},
    "part": lambda: {
        "x": tf.data.Dataset.from_tensor_slices((IDS, IDS)).batch(BATCH_SIZE).repeat(2),
        "steps_per_epoch": STEPS,
    },
}


def counts_in(model):
    """What each variable says of the updates of weights: how often each element was updated."""
    table, *weights = model.trainable_variables
    slots = [v for v in model.optimizer.variables if "accumulator" in v.path]
    if not slots:
        return [-v.numpy().ravel() for v in weights], -table.numpy().ravel()
    of_table, *of_weights = [slot.numpy().ravel() - 0.1 for slot in slots]
    return of_weights, of_table


def problems(model, before, history, data):
    """What is wrong after a `fit` of two epochs."""
    found = []
    iterations = int(model.optimizer.iterations.numpy())
    if iterations != before + 2 * STEPS:
        found.append(f"iterations {before} -> {iterations}")
    weights, rows = counts_in(model)
    found += [
        f"weights {weight} after {iterations}"
        for weight in weights
        if not np.allclose(weight, iterations, rtol=0, atol=0.4)
    ]
    if not math.isclose(rows.sum(), iterations * BATCH_SIZE, abs_tol=0.4):
        found.append(f"rows were trained {rows.sum()} times, not {iterations * BATCH_SIZE}")
    if data != "endless":
        times = (rows - rows_before[id(model)]).round()
        wrong = np.flatnonzero(times != 2)
        if len(wrong):
            found.append(f"rows {wrong.tolist()} were trained {times[wrong].tolist()} times, not 2")
    rows_before[id(model)] = rows
    expected = {
        "batches": STEPS,
        "examples": NUM_EXAMPLES,
        "ids": int(IDS.sum(dtype="int64")),
        "squares": int((IDS.astype("int64") ** 2).sum()),
    }
    if data == "endless":
        expected = {name: expected[name] for name in ("batches", "examples")}
    for name, value in expected.items():
        # Which examples the first of two epochs of one pass is of, is left to chance.
        is_sum = data == "part" and name in ("ids", "squares")
        if (sum(history[name]) != 2 * value) if is_sum else (history[name] != [value] * 2):
            found.append(f"{name}: {history[name]}, not {value}")
    return found


parser = argparse.ArgumentParser()
parser.add_argument("--kills", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument(
    "--arguments", type=json.loads, default={}, help="more arguments of the strategy, as JSON"
)
parser.add_argument("--num-shards", type=int, default=2, help="1: small variables are on one ps")
options = parser.parse_args()
if options.num_shards > 1:
    spread()
    compiled.COMPILED_BYTES = 0  # XLA compiles the updates of Adagrad
chance = random.Random(options.seed)
report = {"problems": [], "calls": collections.Counter(), "kills": 0}
with kerasps.LocalCluster(num_workers=2, num_ps=2) as cluster:
    strategy = kerasps.ParameterServerStrategy(
        cluster.cluster_resolver,
        variable_partitioner=kerasps.FixedShardsPartitioner(options.num_shards),
        table_min_bytes=0 if options.num_shards > 1 else 512,
        **options.arguments,
    )
    models = [
        compiled_unit_model(strategy, NUM_EXAMPLES, lambda make=make: make(1.0), steps)
        for make in (keras.optimizers.SGD, keras.optimizers.Adagrad)
        for steps in (1, 7)
    ]
    rows_before = {id(model): np.zeros(NUM_EXAMPLES) for model in models}
    killer = Killer(cluster, random.Random(options.seed + 1), most_between=3, most_away=1.5)
    killer.start()
    while killer.kills < options.kills and not report["problems"]:
        index, data = chance.randrange(len(models)), chance.choice(sorted(DATA))
        callbacks = chance.choice([[], [], [Listening()]])
        report["calls"][data] += 1
        model, kills = models[index], killer.kills
        before = int(model.optimizer.iterations.numpy())
        history = model.fit(**DATA[data](), epochs=2, verbose=0, callbacks=callbacks).history
        report["problems"] += [
            f"model {index}, {data}, {len(callbacks)} callbacks, kills {kills} to {killer.kills}: "
            f"{problem}"
            for problem in problems(model, before, history, data)
        ]
    killer.is_over.set()
    killer.join()
    report["kills"] = killer.kills
    print("REPORT " + json.dumps(report), flush=True)
