"""Two workers on the rows of one table: each update of a row reads what the one before wrote."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.variables import row_pools
from kerasps.variables.pooled_rows import PooledRows
from kerasps.variables.slots import slots_of
from support.compare import MAX_ATTEMPTS
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


COUPLED = {
    name: getattr(keras.optimizers, name)
    for name in ("Adafactor", "Lamb", "Muon")
    if hasattr(keras.optimizers, name)
}


@pytest.mark.parametrize("name", with_matrix(COUPLED, at_length=[*COUPLED][1:]))
def test_updates_that_couple_rows_lose_nothing(strategy, name):
    def train(model, data):
        model.compile(COUPLED[name](0.01), loss=lambda y, out: out, steps_per_execution=5)
        history = model.fit(data, steps_per_epoch=100, epochs=2, verbose=0, shuffle=False)
        return model, history.history["loss"]

    def make():
        # Each row of the kernel has a gradient of its own, the same in each step.
        return keras.Sequential(
            [
                keras.Input((400,)),
                keras.layers.Dense(100, use_bias=False, kernel_initializer="ones"),
            ]
        )

    x = np.linspace(-1.0, 2.0, 400, dtype="float32")
    data = tf.data.Dataset.from_tensors((x[None], np.zeros((1, 100), "float32"))).repeat()
    plain, losses = train(make(), data)
    # The kernel follows from norms too, which a worker may know late.
    off = []
    for _ in range(MAX_ATTEMPTS):
        with strategy.scope():
            ours, our_losses = train(make(), kerasps.DatasetCreator(lambda context: data))
        kernel = ours.layers[0].kernel
        off.append(np.max(np.abs(kernel.numpy() - plain.layers[0].kernel.numpy())))
        if off[-1] <= 0.1 and our_losses == pytest.approx(losses, rel=0.1):
            break
    else:
        pytest.fail(f"kernels off by {off}, {MAX_ATTEMPTS} times; {our_losses}, not {losses}")
    assert len({shard.device for shard in kernel.shards}) == 2
    assert int(ours.optimizer.iterations.numpy()) == 200
    # Slots follow from gradients, each of which counts once, and Adafactor's also from the number
    # of iterations.
    tolerance = 0.05 if name == "Adafactor" else 1e-5
    for expected, actual in zip(
        slots_of(plain.optimizer)[0], slots_of(ours.optimizer)[0], strict=True
    ):
        np.testing.assert_allclose(
            actual.numpy(), expected.numpy(), rtol=tolerance, err_msg=actual.path
        )
    assert losses[1] < losses[0]
