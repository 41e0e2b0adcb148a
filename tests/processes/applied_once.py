"""Trains while workers are killed and restarted at random, and looks what the ps have applied; run
as a process of its own by test_applied_once.py and test_sync.py.

    python tests/processes/applied_once.py --kills 20 --seed 3
    python tests/processes/applied_once.py --arguments '{"max_staleness": 3}'
    python tests/processes/applied_once.py --num-shards 1
    python tests/processes/applied_once.py --arguments '{"update_mode": "sync"}' --calls 6

The third has all of a model lie on one ps while steps are in flight; else it is on both.

With a gradient of 1 and a learning rate of 1, a weight is minus the number of its updates, and a
row of the table minus the number of times that its example was trained on. Adagrad's slots count
too. Synchronous updates are by the mean, so a row moves by a half where another worker took part.
Prints one JSON line: how many kills there were, and what was wrong after them.
"""

from __future__ import annotations

import argparse
import collections
import json
import random

import keras
import numpy as np
import tensorflow as tf
from scenario import Killer, local_strategy, print_report

import kerasps
from kerasps.step.updates import compiled
from support.spread import spread
from support.unit_gradients import (
    Listening,
    compiled_unit_model,
    endless,
    logs_of,
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
    "part": lambda: {
        "x": tf.data.Dataset.from_tensor_slices((IDS, IDS)).batch(BATCH_SIZE).repeat(2),
        "steps_per_epoch": STEPS,
    },
}


def counts_in(model):
    """What a model says of its updates: iterations, how often each weight was updated, and rows."""
    slots = [slot.numpy() - 0.1 for slot in model.optimizer.variables if "accumulator" in slot.path]
    table, *weights = slots or [-variable.numpy() for variable in model.trainable_variables]
    weights = np.concatenate([weight.ravel() for weight in weights])
    return int(model.optimizer.iterations.numpy()), weights, table.ravel()


def wrong_counts(before, after, data, kills):
    """What is wrong with what a `fit` of two epochs has applied."""
    updates, weights, rows = (new - old for new, old in zip(after, before, strict=True))
    if is_synchronous:
        allowed = range(STEPS, 2 * STEPS + 1)
        # A worker that is lost may have pushed to one ps and not to the other.
        is_wrong = (np.abs(weights - updates) > kills) | (np.abs(weights - weights.round()) > 0.01)
        wrong_rows = np.flatnonzero(~np.isin(rows, [1, 1.5, 2]))
    else:
        allowed = [2 * STEPS]
        is_wrong = np.abs(weights - updates) > 0.4
        wrong_rows = np.flatnonzero(rows.round() != 2)
        if abs(rows.sum() - updates * BATCH_SIZE) > 0.4:
            yield f"rows were trained {rows.sum()} times in {updates} updates"
    if updates not in allowed:
        yield f"{updates} updates of {2 * STEPS} batches"
    if is_wrong.any():
        yield f"weights {np.flatnonzero(is_wrong).tolist()} moved by {weights[is_wrong].tolist()}"
    if data != "endless" and len(wrong_rows):
        yield f"rows {wrong_rows.tolist()} moved by {rows[wrong_rows].tolist()}"


def wrong_logs(history, data):
    for name, value in logs_of(IDS, BATCH_SIZE).items():
        if name in ("ids", "squares") and data == "endless":
            continue
        # Which examples the first of two epochs of one pass is of, is left to chance.
        is_sum = data == "part" and name in ("ids", "squares")
        if (sum(history[name]) != 2 * value) if is_sum else (history[name] != [value] * 2):
            yield f"{name}: {history[name]}, not {value}"


parser = argparse.ArgumentParser()
parser.add_argument("--kills", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--calls", type=int, default=0, help="of fit, before the first kill")
parser.add_argument("--seconds", type=float, default=3, help="between two kills at most")
parser.add_argument(
    "--arguments", type=json.loads, default={}, help="more arguments of the strategy, as JSON"
)
parser.add_argument("--num-shards", type=int, default=2, help="1: small variables are on one ps")
options = parser.parse_args()
is_synchronous = options.arguments.get("update_mode") == "sync"
names = sorted(DATA.keys() - ({"part"} if is_synchronous else {"uneven"}))
makers = [keras.optimizers.SGD, *([] if is_synchronous else [keras.optimizers.Adagrad])]
if options.num_shards > 1:
    spread()
    if not is_synchronous:
        compiled.COMPILED_BYTES = 0  # XLA compiles the updates of Adagrad
chance = random.Random(options.seed)
report = {"problems": [], "unharmed": collections.Counter(), "kills": 0}
with local_strategy(
    shards=2 if is_synchronous else None,
    table_min_bytes=0 if options.num_shards > 1 else 512,
    **options.arguments,
) as (cluster, strategy):
    models = [
        compiled_unit_model(strategy, NUM_EXAMPLES, lambda make=make: make(1.0), steps)
        for make in makers
        for steps in (1, 7)
    ]
    killer = Killer(
        cluster, random.Random(options.seed + 1), most_between=options.seconds, most_away=1.5
    )
    unharmed = report["unharmed"]
    while (killer.kills < options.kills or unharmed.total() < options.calls) and not report[
        "problems"
    ]:
        if unharmed.total() == options.calls and killer.ident is None:
            killer.start()
        index, data = chance.randrange(len(models)), chance.choice(names)
        callbacks = chance.choice([[], [], [Listening()]])
        if killer.ident is None:
            unharmed[data] += 1
        model, kills, before = models[index], killer.kills, counts_in(models[index])
        history = model.fit(**DATA[data](), epochs=2, verbose=0, callbacks=callbacks).history
        # One that came before the call may be noticed in it.
        during = killer.kills - kills + 1 if killer.kills else 0
        report["problems"] += [
            f"seed {options.seed}, model {index}, {data}, {len(callbacks)} callbacks, "
            f"kills {kills} to {killer.kills}: {problem}"
            for problem in (
                *wrong_counts(before, counts_in(model), data, during),
                *wrong_logs(history, data),
            )
        ]
    killer.is_over.set()
    if killer.ident is not None:
        killer.join()
    report["kills"] = killer.kills
    print_report(report)
