"""Tables whose rows lie in storages that they share."""

from __future__ import annotations

import gc
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.variables import ParameterServerVariable
from kerasps.variables.rows import row_pools
from kerasps.variables.rows.pooled_rows import PooledRows
from kerasps.variables.storage.names import NAMES
from support.compare import assert_equal, assert_identical, train_both
from support.matrix import with_matrix
from support.tables import EXACT, WIDTH, compiled

HEIGHTS = [300, 40, 500, 7, 260, 90, 41]


@pytest.fixture(autouse=True)
def sharing(strategy, monkeypatch):
    """All tables of the module share storages, from the first one on."""
    if strategy.options.sparse_updates != "lazy":
        pytest.skip("tables that are updated as a whole share no storage")
    monkeypatch.setattr(row_pools, "NUM_SEPARATE", 0)


def make_tables(strategy, heights=HEIGHTS, **options):
    with strategy.scope():
        layers = [keras.layers.Embedding(height, WIDTH, **options) for height in heights]
        for layer in layers:
            layer.build()
    return layers


def held_by_whom(variable):
    return [(shard.store.holder.shared_name, shard.store.begin) for shard in variable.shards]


@pytest.mark.parametrize("num_shards", [1, 3])
def test_what_changes_one_table_changes_no_other(strategy, sharded, num_shards):
    sharded(num_shards)
    values = [np.random.default_rng(i).random((n, WIDTH)) for i, n in enumerate(HEIGHTS)]
    values = [value.astype("float32") for value in values]
    tables = [layer.embeddings for layer in make_tables(strategy)]
    assert all(isinstance(shard, PooledRows) for table in tables for shard in table.shards)
    for table, value in zip(tables, values, strict=True):
        table.assign(value)
    changed, value = tables[2], values[2]
    changed.assign_add(np.ones_like(value))
    value += 1
    changed.assign_sub(np.full_like(value, 2.0))
    value -= 2
    rows, some = np.array([0, 499, 3, 8]), np.ones((4, WIDTH), "float32")
    changed.storage.scatter_add(tf.IndexedSlices(some, rows))
    value[rows] += 1
    changed.storage.scatter_sub(tf.IndexedSlices(3 * some, rows))
    value[rows] -= 3
    changed.storage.scatter_update(tf.IndexedSlices(some, rows[:1].repeat(4)))
    value[0] = 1
    for table, expected in zip(tables, values, strict=True):
        np.testing.assert_array_equal(table.numpy(), expected)
        np.testing.assert_array_equal(tf.gather(table, [[0], [6]]), expected[[[0], [6]]])
    names = [name for task in strategy.placement() for name in task.names]
    for table in tables:
        assert {shard.name for shard in table.shards} <= set(names)


@pytest.mark.parametrize("bad", [-1, 40, 2**31 - 1])
def test_rows_of_another_table_are_out_of_range(strategy, bad):
    _, layer, _ = make_tables(strategy, [300, 40, 300])
    rows = np.array([3, bad])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"has 40 rows(.|\n)*\[0, 40\)"):
        layer.embeddings.storage.sparse_read(rows)
    slices = tf.IndexedSlices(tf.ones([2, WIDTH]), rows)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 40 rows"):
        layer.embeddings.storage.scatter_add(slices)
    looked_up = tf.function(lambda ids: layer.embeddings.storage.sparse_read(ids))
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 40 rows"):
        np.asarray(looked_up(tf.constant(rows)))


@pytest.mark.parametrize(
    ("num_shards", "in_function"),
    with_matrix([(1, False), (1, True), (3, False), (3, True)], at_length=[(1, True), (3, False)]),
)
def test_each_table_has_its_own_gradient(strategy, sharded, num_shards, in_function):
    sharded(num_shards)
    first, second, untouched = make_tables(strategy, [300, 40, 300])

    def loss():
        twice = tf.reduce_sum(first(np.array([5, 5, 299])) * 3.0)
        return twice + tf.reduce_sum(second.embeddings.value * 2.0)

    called = tf.function(loss) if in_function else loss
    with tf.GradientTape() as tape:
        found = called()
    tables = [layer.embeddings for layer in (first, second, untouched)]
    gradients = tape.gradient(found, tables)
    assert gradients[2] is None
    dense = [np.asarray(tf.convert_to_tensor(gradient)) for gradient in gradients[:2]]
    expected = np.zeros((300, WIDTH))
    expected[[5, 299]] = [[6.0], [3.0]]
    np.testing.assert_array_equal(dense[0], expected)
    np.testing.assert_array_equal(dense[1], np.full((40, WIDTH), 2.0))


def test_a_function_reads_what_it_has_written(strategy):
    _, layer, _ = make_tables(strategy, [300, 40, 300])
    table, ones = layer.embeddings, tf.ones([40, WIDTH])

    @tf.function
    def write_and_read(start):
        found = []
        for i in range(10):
            table.assign(ones * (start + i))
            found.append(tf.reduce_mean(tf.convert_to_tensor(table.value)))
            found.append(tf.reduce_mean(layer(tf.range(40))))
            table.assign_add(ones * 0.5)
            found.append(tf.reduce_mean(layer(tf.range(40))))
        return tf.reshape(tf.stack(found), [10, 3])

    for start in range(20):
        expected = start + np.arange(10)[:, None] + [[0, 0, 0.5]]
        np.testing.assert_array_equal(write_and_read(tf.constant(float(start))), expected)


def test_slots_lie_at_the_same_places_as_their_tables(strategy):
    layers = make_tables(strategy)
    tables = [layer.embeddings for layer in layers]
    with strategy.scope():
        optimizer = keras.optimizers.Adam()
        optimizer.build(tables)
    for slots in (optimizer._momentums, optimizer._velocities):
        for table, slot in zip(tables, slots, strict=True):
            (held,), (of_slot,) = table.shards, slot.shards
            assert of_slot.store.begin == held.store.begin
            assert of_slot.store.holder is not held.store.holder
            np.testing.assert_array_equal(slot.numpy(), np.zeros_like(table.numpy()))
    # A second optimizer has slots of its own.
    with strategy.scope():
        other = keras.optimizers.Adagrad(initial_accumulator_value=0.5)
        other.build(tables)
    np.testing.assert_array_equal(other._accumulators[2].numpy(), np.full((500, WIDTH), 0.5))
    np.testing.assert_array_equal(optimizer._momentums[2].numpy(), np.zeros((500, WIDTH)))


def test_places_that_were_left_are_taken_again(strategy):
    gc.collect()
    layers = make_tables(strategy)
    places = [held_by_whom(layer.embeddings) for layer in layers]
    kept = layers[0].embeddings.numpy()
    del layers[1:]
    gc.collect()
    layers += make_tables(strategy, HEIGHTS[1:])
    assert [held_by_whom(layer.embeddings) for layer in layers] == places
    np.testing.assert_array_equal(layers[0].embeddings.numpy(), kept)


def test_places_are_not_taken_while_a_slot_is_there(strategy):
    layer, _ = make_tables(strategy, [300, 40])
    place = held_by_whom(layer.embeddings)
    with strategy.scope():
        slot = keras.optimizers.SGD(momentum=0.9)
        slot.build([layer.embeddings])
    moments = slot.momentums if hasattr(slot, "momentums") else slot._momentums
    moments[0].assign(np.ones((300, WIDTH), "float32"))
    del layer
    slot._trainable_variables.clear()
    gc.collect()
    (other,) = make_tables(strategy, [300])
    assert held_by_whom(other.embeddings) != place
    np.testing.assert_array_equal(moments[0].numpy(), np.ones((300, WIDTH)))


def test_steps_that_were_given_up_may_write_to_no_new_table(strategy):
    (layer,) = make_tables(strategy, [300])
    place = held_by_whom(layer.embeddings)
    NAMES.retire()
    with strategy.scope():
        optimizer = keras.optimizers.Adagrad()
        optimizer.build([layer.embeddings])
    (slot,) = optimizer._accumulators[0].shards
    assert not isinstance(slot, PooledRows)
    assert slot.device == layer.embeddings.device
    (other,) = make_tables(strategy, [300])
    del layer
    gc.collect()
    (third,) = make_tables(strategy, [300])
    assert place not in (held_by_whom(other.embeddings), held_by_whom(third.embeddings))


def test_a_storage_is_freed_with_its_last_table(strategy):
    layers = make_tables(strategy)
    holders = {
        (s.store.holder.shared_name, s.device) for layer in layers for s in layer.embeddings.shards
    }

    def is_there(name, device):
        with tf.device(device):
            handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[1], shared_name=name)
            return bool(tf.raw_ops.VarIsInitializedOp(resource=handle).numpy())

    gc.collect()
    assert all(is_there(*holder) for holder in holders)
    del layers
    gc.collect()
    others = {
        (s.store.holder.shared_name, s.device)
        for layer in make_tables(strategy, [300])
        for s in layer.embeddings.shards
    }
    assert not any(is_there(*holder) for holder in holders - others)


def test_few_tables_and_large_ones_are_by_themselves(strategy, monkeypatch):
    monkeypatch.setattr(row_pools, "NUM_SEPARATE", 3)
    monkeypatch.setattr(row_pools, "MAX_TABLE_BYTES", 400 * WIDTH * 4)
    width = WIDTH + 1  # of which there is no other table
    with strategy.scope():
        layers = [keras.layers.Embedding(n, width) for n in (300,) * 9 + (600,)]
        layers.append(keras.layers.Dense(width, kernel_initializer="ones"))
        for layer in layers[:-1]:
            layer.build()
        layers[-1].build((None, 300))
    *small, large, kernel = (*(layer.embeddings for layer in layers[:-1]), layers[-1].kernel)
    # The first three on each ps are by themselves.
    separate = Counter()
    for table in small:
        device = table.shards[0].device
        assert isinstance(table.shards[0], PooledRows) == (separate[device] == 3)
        separate[device] += not isinstance(table.shards[0], PooledRows)
    assert sum(separate.values()) < 9
    assert not isinstance(large.shards[0], PooledRows)
    assert not isinstance(kernel.shards[0], PooledRows)


def make_model(heights, optimizer, steps_per_execution):
    keras.utils.set_random_seed(1)
    inputs = [keras.Input((3,), dtype="int32") for _ in heights]
    found = [
        keras.layers.Embedding(height, WIDTH)(ids)
        for height, ids in zip(heights, inputs, strict=True)
    ]
    flat = keras.layers.Flatten()(keras.layers.Add()(found))
    return compiled(
        keras.Model(inputs, keras.layers.Dense(1)(flat)),
        optimizer,
        steps_per_execution,
        jit_compile=False,
    )


@pytest.mark.parametrize(
    ("optimizer", "num_shards", "num_separate", "steps_per_execution"),
    with_matrix(
        [
            *(("sgd", 1, 0, 1), ("adagrad", 1, 1, 10), ("adagrad", 3, 1, 1)),
            *(("adam", 3, 0, 5), ("adam", 3, 0, 10)),
        ],
        at_length=[
            *(("sgd", 1, 0, 1), ("adagrad", 1, 1, 10), ("adagrad", 3, 1, 1)),
            ("adam", 3, 0, 10),
        ],
    ),
)
def test_tables_in_runs_equal_plain_keras(
    strategy, sharded, monkeypatch, optimizer, num_shards, num_separate, steps_per_execution
):
    sharded(num_shards)
    monkeypatch.setattr(row_pools, "NUM_SEPARATE", num_separate)
    # So small that they lie in several, whichever are by themselves.
    heights = HEIGHTS * 2
    monkeypatch.setattr(row_pools, "POOL_BYTES", 700 * WIDTH * 4)
    generator = np.random.default_rng(0)
    x = tuple(generator.integers(0, height, (320, 3)) for height in heights)
    y = np.sin(sum(x).sum(1, keepdims=True)).astype("float32")
    plain, ours = train_both(
        strategy,
        lambda: make_model(heights, optimizer, steps_per_execution),
        (x, y),
        sum_repeated_ids=True,
        lazy=optimizer == "adam",
    )
    shards = [shard for layer in embeddings_of(ours) for shard in layer.embeddings.shards]
    assert len({id(s.store.holder) for s in shards if isinstance(s, PooledRows)}) > 1
    assert_identical(plain, ours) if optimizer in EXACT else assert_equal(plain, ours)


def test_slots_that_lie_elsewhere_than_their_tables_equal_plain_keras(strategy):
    def make():
        model = make_model(HEIGHTS, "adagrad", 5)
        if isinstance(model.layers[-1].kernel, ParameterServerVariable):
            NAMES.retire()
        return model

    generator = np.random.default_rng(0)
    x = tuple(generator.integers(0, height, (320, 3)) for height in HEIGHTS)
    y = np.sin(sum(x).sum(1, keepdims=True)).astype("float32")
    plain, ours = train_both(strategy, make, (x, y), sum_repeated_ids=True)
    (held,) = embeddings_of(ours)[0].embeddings.shards
    slots = [v for v in ours.optimizer.variables if tuple(v.shape) == (HEIGHTS[0], WIDTH)]
    assert isinstance(held, PooledRows)
    assert not any(isinstance(shard, PooledRows) for slot in slots for shard in slot.shards)
    assert_identical(plain, ours)


def embeddings_of(model):
    return [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]


def trained_model(strategy):
    """A model of tables in pools, that was trained, and its data."""
    with strategy.scope():
        model = make_model(HEIGHTS, "adagrad", 2)
    x = tuple(np.arange(24, dtype="int32").reshape(8, 3) % height for height in HEIGHTS)
    model.fit(x, np.ones((8, 1), "float32"), batch_size=4, verbose=0)
    return model, x


@pytest.mark.parametrize("kind", ["keras", "checkpoint"])
def test_what_was_saved_is_what_others_load(strategy, tmp_path, monkeypatch, kind):
    shared, _ = trained_model(strategy)
    monkeypatch.setattr(row_pools, "NUM_SEPARATE", 100)
    with strategy.scope():
        by_itself = make_model(HEIGHTS, "adagrad", 2)
    models = [shared, by_itself, make_model(HEIGHTS, "adagrad", 2)]
    for model in models:
        model.optimizer.build(model.trainable_variables)
    for saved in models:
        values = [np.random.default_rng(1).random(v.shape) for v in saved.weights]
        saved.set_weights(values)
        path = tmp_path / ("saved.keras" if kind == "keras" else "checkpoint")
        if kind == "keras":
            saved.save(path)
        else:
            tf.train.Checkpoint(model=saved).write(str(path))
        for other in models:
            other.set_weights([np.zeros_like(value) for value in values])
            if kind == "checkpoint":
                tf.train.Checkpoint(model=other).read(str(path)).expect_partial()
            else:
                other.load_weights(path)
            for ours, expected in zip(other.get_weights(), values, strict=True):
                np.testing.assert_array_equal(ours, expected.astype("float32"))


def test_a_saved_model_predicts_as_its_model(strategy, tmp_path):
    model, x = trained_model(strategy)
    model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    found = loaded.serve([tf.constant(ids, tf.int32) for ids in x])
    np.testing.assert_allclose(found, model.predict(x, verbose=0), rtol=1e-5)


def test_an_export_may_list_the_storages_of_variables(strategy, tmp_path):
    # As `model.export` of Keras 3.16 does.
    model, x = trained_model(strategy)
    exported = tf.Module()
    exported.variables_of_model = [variable._value for variable in model.variables]
    exported.serve = tf.function(lambda *ids: model(list(ids)))
    inputs = [tf.constant(ids, tf.int32) for ids in x]
    exported.serve(*inputs)
    tf.saved_model.save(exported, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    found = loaded.serve(*inputs)
    np.testing.assert_allclose(found, model.predict(x, verbose=0), rtol=1e-5)
