"""Trains with synchronous updates while workers are killed and restarted at random, and looks what
the ps have applied; run as a process of its own by test_sync.py.

    python tests/processes/synchronous_losses.py --calls 6 --kills 20 --seed 3

With gradients of 1, their mean is 1, and with a learning rate of 1 a weight is minus the number of
its updates. A row of the table moves by 1 where its example was trained on by one worker alone, and
by a half where another took part. Prints one JSON line: how many kills there were, and what was
wrong after them.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from killed_at_random import Killer

import kerasps

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


def uneven(context):
    # One worker has twice as many batches as the other.
    at = NUM_EXAMPLES // 3
    ids = [IDS[:at], IDS[at:]][context.input_pipeline_id]
    return tf.data.Dataset.from_tensor_slices((ids, ids)).batch(BATCH_SIZE)


DATA = {
    "endless": lambda: {
        "x": kerasps.DatasetCreator(endless(IDS, BATCH_SIZE)),
        "steps_per_epoch": STEPS,
    },
    "arrays": lambda: {"x": IDS, "y": IDS, "batch_size": BATCH_SIZE},
    "uneven": lambda: {"x": kerasps.DatasetCreator(uneven)},
    "unknown": lambda: {"x": of_unknown_length(IDS, BATCH_SIZE)},
}


def problems(model, before, history, data, kills):
    """What is wrong after a `fit` of two epochs."""
    found = []
    iterations = int(model.optimizer.iterations.numpy())
    updates = iterations - before["iterations"]
    if not STEPS <= updates <= 2 * STEPS:
        found.append(f"{updates} updates of {2 * STEPS} batches")
    table, *weights = model.trainable_variables
    for weight, start in zip(weights, before["weights"], strict=True):
        moved = start - weight.numpy()
        # A worker that is lost may have pushed to one ps and not to the other.
        if np.abs(moved - updates).max() > kills or np.abs(moved - moved.round()).max() > 0.01:
            found.append(f"weights moved by {moved.tolist()} in {updates} updates")
    if data != "endless":
        moved = before["rows"] - table.numpy().ravel()
        wrong = np.flatnonzero(~np.isin(moved, [1, 1.5, 2]))
        if len(wrong):
            found.append(f"rows {wrong.tolist()} moved by {moved[wrong].tolist()}")
    expected = {
        "batches": STEPS,
        "examples": NUM_EXAMPLES,
        "ids": int(IDS.sum(dtype="int64")),
        "squares": int((IDS.astype("int64") ** 2).sum()),
    }
    if data == "endless":
        expected = {name: expected[name] for name in ("batches", "examples")}
    found += [
        f"{name}: {history[name]}, not {value}"
        for name, value in expected.items()
        if history[name] != [value] * 2
    ]
    return found


parser = argparse.ArgumentParser()
parser.add_argument("--kills", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--calls", type=int, default=0, help="of fit, before the first kill")
parser.add_argument("--seconds", type=float, default=8, help="between two kills at most")
options = parser.parse_args()
chance = random.Random(options.seed)
report = {"problems": [], "unharmed": collections.Counter(), "kills": 0}
spread()
with kerasps.LocalCluster(num_workers=2, num_ps=2) as cluster:
    strategy = kerasps.ParameterServerStrategy(
        cluster.cluster_resolver,
        variable_partitioner=kerasps.FixedShardsPartitioner(2, min_bytes=0),
        table_min_bytes=0,
        update_mode="sync",
    )
    models = [
        compiled_unit_model(strategy, NUM_EXAMPLES, lambda: keras.optimizers.SGD(1.0), steps)
        for steps in (1, 7)
    ]
    killer = Killer(
        cluster, random.Random(options.seed + 1), most_between=options.seconds, most_away=1.5
    )
    unharmed = report["unharmed"]
    while (killer.kills < options.kills or sum(unharmed.values()) < options.calls) and not report[
        "problems"
    ]:
        if sum(unharmed.values()) == options.calls and killer.ident is None:
            killer.start()
        index, data = chance.randrange(len(models)), chance.choice(sorted(DATA))
        callbacks = chance.choice([[], [], [Listening()]])
        if killer.ident is None:
            unharmed[data] += 1
        model, kills = models[index], killer.kills
        table, *weights = model.trainable_variables
        before = {
            "iterations": int(model.optimizer.iterations.numpy()),
            "weights": [weight.numpy() for weight in weights],
            "rows": table.numpy().ravel(),
        }
        history = model.fit(**DATA[data](), epochs=2, verbose=0, callbacks=callbacks).history
        print(f"model {index}, {data}, {len(callbacks)}, kills {killer.kills}", flush=True)
        # One that came before the call may be noticed in it.
        during = killer.kills - kills + 1 if killer.kills else 0
        report["problems"] += [
            f"seed {options.seed}, model {index}, {data}, {len(callbacks)} callbacks, "
            f"kills {kills} to {killer.kills}: {problem}"
            for problem in problems(model, before, history, data, during)
        ]
    killer.is_over.set()
    if killer.ident is not None:
        killer.join()
    report["kills"] = killer.kills
    print("REPORT " + json.dumps(report), flush=True)
