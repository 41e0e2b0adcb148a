"""Trains with `overlap=True` on one worker and two ps, in whichever way steps are laid out; run as
a process of its own by test_overlap.py.

With a gradient of 1 each weight says how often, and with which learning rate, it was updated.
Prints one JSON line.
"""

from __future__ import annotations

import keras
import numpy as np
from scenario import local_strategy, print_report

import kerasps
from support.compare import regression_data, train_both
from support.spread import spread
from support.unit_gradients import compiled_unit_model, of_unknown_length

NUM_EXAMPLES, BATCH_SIZE = 264, 4
STEPS = NUM_EXAMPLES // BATCH_SIZE
IDS = np.arange(NUM_EXAMPLES, dtype="int32")[:, None]


DATA = {
    "arrays": lambda: {"x": IDS, "y": IDS, "batch_size": BATCH_SIZE},
    "unknown": lambda: {"x": of_unknown_length(IDS, BATCH_SIZE)},
}


def counted(steps_per_execution, data):
    """Train two epochs; return all that says how often something was done."""
    model = compiled_unit_model(
        strategy, NUM_EXAMPLES, lambda: keras.optimizers.SGD(1.0), steps_per_execution
    )
    history = model.fit(**DATA[data](), epochs=2, verbose=0).history
    table, *weights = model.trainable_variables
    staleness = strategy.staleness()
    return {
        "iterations": int(model.optimizer.iterations.numpy()),
        "rows": sorted(set(table.numpy().ravel().tolist())),
        "weights": sorted({float(v) for w in weights for v in w.numpy().ravel()}),
        "examples": history["examples"],
        "pushes": staleness.pushes,
        "most_stale": staleness.max,
        "mean": staleness.mean,
    }


def weights_after(optimizer):
    """Train with executions of several steps; return the different values of weights."""
    model = compiled_unit_model(strategy, NUM_EXAMPLES, lambda: optimizer, 11)
    model.fit(**DATA["arrays"](), verbose=0)
    return sorted({float(v) for w in model.trainable_variables[1:] for v in w.numpy().ravel()})


def products_of_momenta():
    """Train with Nadam, whose state a step pushes as a value, plainly and overlapping."""

    def make_model():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Nadam(0.01), "mse", steps_per_execution=10)
        return model

    plain, ours = train_both(strategy, make_model, regression_data(), steps=30)
    return [float(np.asarray(m.optimizer._u_product)) for m in (plain, ours)]


def difference_step_by_step():
    """Train plainly, and with a callback that is told of each step: then none overlap."""

    def make_model():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=1)
        return model

    told = []
    listener = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: told.append(batch)
    )
    plain, ours = train_both(
        strategy, make_model, regression_data(), steps=20, callbacks=[listener]
    )
    assert told[-20:] == [*range(20)]
    pairs = zip(plain.get_weights(), ours.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


spread()
with local_strategy(
    1, 2, partitioner=kerasps.FixedShardsPartitioner(2), table_min_bytes=0, overlap=True
) as (cluster, strategy):
    report = {
        "counted": {
            f"{steps} {data}": counted(steps, data)
            for steps, data in ((1, "arrays"), (7, "unknown"), (33, "arrays"))
        },
        "scheduled": weights_after(
            keras.optimizers.SGD(
                keras.optimizers.schedules.PiecewiseConstantDecay([20], [1.0, 2.0])
            )
        ),
        "accumulated": weights_after(keras.optimizers.SGD(1.0, gradient_accumulation_steps=3)),
        "products": products_of_momenta(),
        "difference": difference_step_by_step(),
    }
print_report(report)
