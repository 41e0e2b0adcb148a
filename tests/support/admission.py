"""Models with tables that admit ids, a stream of ids, and what NumPy makes of it."""

from __future__ import annotations

import keras
import numpy as np

from kerasps.layers import DynamicEmbedding

BATCH_SIZE = 16


def make_model(admissions=(None,), *, optimizer="adagrad", steps_per_execution=1, **options):
    """Returns a compiled model with a table for each admission, and the tables."""
    options = {"max_rows": 1000, "seed": 1, **options}
    inputs = [keras.Input((2,), dtype="int64") for _ in admissions]
    tables = [DynamicEmbedding(4, admission=each, **options) for each in admissions]
    flat = [keras.layers.Flatten()(table(ids)) for table, ids in zip(tables, inputs, strict=True)]
    joined = keras.layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
    output = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)(joined)
    model = keras.Model(inputs, output)
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    model.optimizer.build(model.trainable_variables)
    return model, tables


def make_model_of_two_calls(admission):
    """Returns a compiled model that calls a layer twice in a step, and the layer."""
    inputs = [keras.Input((3,), dtype="int64") for _ in range(2)]
    table = DynamicEmbedding(4, admission=admission, max_rows=100)
    joined = keras.layers.Concatenate()([table(ids) for ids in inputs])
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(joined)))
    model.compile("sgd", "mse")
    return model, table


def figures_of(table):
    """Returns the figures of a table that admission changes."""
    names = "rows", "candidates", "refused_by_admission"
    return {name: table.figures()[name] for name in names}


def stream(seed, num_examples=320):
    """Returns ids of which some come often and most once."""
    return np.random.default_rng(seed).zipf(1.3, (num_examples, 2)) % 500


def train(model, streams):
    """Trains on streams of ids, in their order."""
    targets = np.ones((len(streams[0]), 1), "float32")
    data = streams if len(streams) > 1 else streams[0]
    model.fit(data, targets, batch_size=BATCH_SIZE, shuffle=False, verbose=0)


def assert_equals_model(table, n, ids):
    """Asserts that a table has the rows, and the counts, that follow from the stream alone."""
    counts, rows, refused = {}, set(), 0
    for start in range(0, len(ids), BATCH_SIZE):
        for key in np.unique(ids[start : start + BATCH_SIZE]):
            if key in rows:
                continue
            counts[key] = counts.get(key, 0) + 1
            if counts[key] >= n:
                rows.add(key)
                del counts[key]
            else:
                refused += 1
    figures = table.figures()
    assert figures["rows"] == len(rows)
    assert figures["candidates"] == len(counts)
    assert figures["refused_by_admission"] == refused
    made = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in table.items())])
    assert set(made) == rows
    candidates = table._candidates.sorted_ids()
    numbers = table._candidates.find_rows(candidates)[:, 0]
    assert dict(zip(candidates, numbers, strict=True)) == counts
