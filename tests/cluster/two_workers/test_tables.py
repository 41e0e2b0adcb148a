"""Two workers on the rows of one table: each update of a row reads what the one before wrote."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import kerasps
from kerasps.variables.keras.slots import slots_of
from kerasps.variables.rows import row_pools
from kerasps.variables.rows.pooled_rows import PooledRows
from support.matrix import with_matrix
from support.models import descending_model, prediction_itself, touches

STEPS = 400
# Enough that an update takes long enough for the other worker's to fall into it: without the lock,
# this loses updates.
NUM_ROWS, WIDTH = 2000, 128
IDS = [*range(0, NUM_ROWS, 2)]

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.5, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.5),
    "adam": lambda: keras.optimizers.Adam(0.5),
}


@pytest.mark.parametrize(
    ("name", "steps_per_execution"),
    with_matrix(
        [*((name, 10) for name in OPTIMIZERS), ("adagrad", 1)],
        at_length=[("momentum", 10), ("adagrad", 10), ("sgd", 10)],
    ),
)
def test_no_update_of_a_row_is_lost(strategy, name, steps_per_execution):
    plain = descending_model(OPTIMIZERS[name](), steps_per_execution, NUM_ROWS, WIDTH)
    plain.fit(touches(IDS), steps_per_epoch=STEPS, verbose=0, shuffle=False)
    with strategy.scope():
        ours = descending_model(OPTIMIZERS[name](), steps_per_execution, NUM_ROWS, WIDTH)
    ours.fit(kerasps.DatasetCreator(lambda context: touches(IDS)), steps_per_epoch=STEPS, verbose=0)
    table = ours.layers[0].embeddings
    assert len({shard.device for shard in table.shards}) == 2
    assert int(ours.optimizer.iterations.numpy()) == STEPS
    assert sum(task.rows_written_per_second for task in strategy.load_report()) > 0
    # The gradient is the same at each step, so the slots are those of plain Keras if, and only if,
    # no update was lost. So is the table, but for Adam's bias correction, which goes by iterations
    # that two workers may see in another order.
    tolerance = 0.02 if name == "adam" else 0.0
    pairs = zip(slots_of(plain.optimizer)[0], slots_of(ours.optimizer)[0], strict=True)
    for expected, actual in [*pairs]:
        np.testing.assert_array_equal(actual.numpy(), expected.numpy(), err_msg=actual.path)
    expected = plain.layers[0].embeddings.numpy()
    np.testing.assert_allclose(table.numpy(), expected, rtol=tolerance, atol=0.0)
    untouched = np.delete(table.numpy(), IDS, axis=0)
    np.testing.assert_array_equal(untouched, np.zeros_like(untouched))
    assert np.all(expected[IDS] < -1.0)


def descending_group(optimizer, num_rows):
    """A model of tables, each element of whose touched rows has a gradient of one at each step."""
    ids = keras.Input((None,), dtype="int32")
    found = [keras.layers.Embedding(number, WIDTH, "zeros")(ids) for number in num_rows]
    total = keras.layers.Lambda(lambda rows: keras.ops.sum(rows, axis=(1, 2)))
    outputs = keras.layers.Add()([total(rows) for rows in found])
    model = keras.Model(ids, outputs)
    model.compile(optimizer, prediction_itself, steps_per_execution=10)
    return model


def test_no_update_of_a_row_of_a_group_is_lost(strategy, monkeypatch):
    monkeypatch.setattr(row_pools, "NUM_SEPARATE", 1)
    # Some in shards, some whole.
    num_rows, ids, steps = [150, 800, 160, 600, 140], [*range(0, 140, 2)], 500
    plain = descending_group(OPTIMIZERS["adagrad"](), num_rows)
    plain.fit(touches(ids), steps_per_epoch=steps, verbose=0, shuffle=False)
    with strategy.scope():
        ours = descending_group(OPTIMIZERS["adagrad"](), num_rows)
    ours.fit(kerasps.DatasetCreator(lambda context: touches(ids)), steps_per_epoch=steps, verbose=0)
    shards = [shard for table in ours.trainable_variables for shard in table.shards]
    assert len(shards) == 7
    assert 0 < sum(isinstance(shard, PooledRows) for shard in shards) < len(shards)
    pairs = [*zip(plain.weights, ours.weights, strict=True)]
    pairs += zip(plain.optimizer.variables, ours.optimizer.variables, strict=True)
    for expected, actual in pairs:
        np.testing.assert_array_equal(actual.numpy(), expected.numpy(), err_msg=actual.path)
