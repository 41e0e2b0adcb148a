"""Tables without a vocabulary: on ids below a number they equal fixed tables."""

from __future__ import annotations

import gc

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

import kerasps
from kerasps.layers import DynamicEmbedding
from support.matrix import with_matrix
from support.process_checks import wait_for

HEIGHT, WIDTH, BATCH_SIZE = 60, 4, 16
VALUES = [0.1, 0.2, 0.3]
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Lion": lambda: keras.optimizers.Lion(0.01),
}
AT_LENGTH = [name for name in OPTIMIZERS if name not in ("SGD", "Adagrad", "Adam")]


@pytest.fixture(autouse=True)
def by_rows(strategy):
    if strategy.options.sparse_updates != "lazy":
        pytest.skip("updates of whole tables have a test of their own")


def fixed(value):
    return keras.layers.Embedding(
        HEIGHT, WIDTH, embeddings_initializer=keras.initializers.Constant(value)
    )


def dynamic(value, **options):
    return DynamicEmbedding(WIDTH, keras.initializers.Constant(value), **options)


def make_model(strategy, make_table, optimizer="sgd", **compiled):
    """Returns a model with a table for each of `VALUES`, and its tables."""
    with strategy.scope():
        inputs = [keras.Input((3,), dtype="int64") for _ in VALUES]
        tables = [make_table(value) for value in VALUES]
        flat = [
            keras.layers.Flatten()(table(ids)) for table, ids in zip(tables, inputs, strict=True)
        ]
        output = keras.layers.Dense(1, kernel_initializer="ones")(keras.layers.Concatenate()(flat))
        model = keras.Model(inputs, output)
        model.compile(optimizer, "mse", **compiled)
    return model, tables


def batches(seed=0, num_batches=20):
    generator = np.random.default_rng(seed)
    shape = (num_batches * BATCH_SIZE, 3)
    ids = tuple(generator.integers(0, HEIGHT, shape) for _ in VALUES)
    targets = generator.random((len(ids[0]), 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((ids, targets)).batch(BATCH_SIZE)


def assert_same_rows(dynamic_tables, fixed_tables):
    for ours, theirs in zip(dynamic_tables, fixed_tables, strict=True):
        # Rows are in another order, and a processor computes the last ones of a vector otherwise.
        np.testing.assert_allclose(
            ours.rows(np.arange(HEIGHT)), np.array(theirs.embeddings), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("optimizer", with_matrix(OPTIMIZERS, AT_LENGTH))
def test_a_table_equals_a_fixed_one(strategy, sharded, optimizer):
    sharded(2)
    compiled = {"steps_per_execution": 4}
    ours, tables = make_model(strategy, dynamic, OPTIMIZERS[optimizer](), **compiled)
    theirs, fixed_tables = make_model(strategy, fixed, OPTIMIZERS[optimizer](), **compiled)
    losses = [model.fit(batches(), verbose=0).history["loss"] for model in (ours, theirs)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert_same_rows(tables, fixed_tables)


def test_slots_of_a_later_optimizer_begin_with_each_row(strategy):
    first = OPTIMIZERS["Adagrad"], OPTIMIZERS["Adam"]
    tables = []
    for make_table in (dynamic, fixed):
        model, found = make_model(strategy, make_table)
        tables.append(found)
        kept = [make() for make in first]
        for seed, optimizer in enumerate([*kept, kept[0]]):
            model.compile(optimizer, "mse")
            # Few batches, so that some rows are made under each optimizer.
            model.fit(batches(seed, num_batches=1), verbose=0)
    assert tables[0][0].num_rows > 30
    assert_same_rows(*tables)


def test_only_training_makes_rows(strategy):
    model, tables = make_model(strategy, dynamic)
    data = batches(num_batches=2)
    model.evaluate(data, verbose=0)
    model.predict(data, verbose=0)
    model.predict_on_batch([np.array([[1, 2, 3]])] * 3)
    model([np.array([[1, 2, 3]])] * 3)
    assert [table.num_rows for table in tables] == [0, 0, 0]
    model.train_on_batch([np.array([[1, -2, 2**40]])] * 3, np.array([[1.0]]))
    assert [table.num_rows for table in tables] == [3, 3, 3]
    ids, rows = zip(*tables[0].items(), strict=True)
    assert sorted(np.concatenate(ids)) == [-2, 1, 2**40]
    assert (np.concatenate(rows) != 0.1).all()
    np.testing.assert_allclose(tables[1].rows([5, 2**50]), 0.2)


def test_a_table_that_is_not_trained_gets_no_rows(strategy):
    model, tables = make_model(strategy, lambda value: dynamic(value, trainable=False))
    model.fit(batches(num_batches=2), verbose=0)
    assert [table.num_rows for table in tables] == [0, 0, 0]


@pytest.mark.parametrize("initializer", ["uniform", "normal"])
def test_first_rows_have_the_bits_of_one_process(strategy, initializer):
    ids = np.array([0, 1, -5, 2**62, 77])
    alone = DynamicEmbedding(7, initializer, seed=3)
    alone(ids)
    with strategy.scope():
        table = DynamicEmbedding(7, initializer, seed=3)
        other = DynamicEmbedding(7, initializer, seed=4)
        table(ids[::-1])
        other(ids)
    np.testing.assert_array_equal(table.rows(ids), alone.rows(ids))
    assert (table.rows(ids) != other.rows(ids)).all()


def test_words_in_bags(strategy):
    with strategy.scope():
        words = keras.Input((None,), dtype="string")
        table = DynamicEmbedding(WIDTH, "ones", combiner="mean")
        model = keras.Model(words, keras.layers.Dense(1, kernel_initializer="ones")(table(words)))
        model.compile(keras.optimizers.SGD(1.0), "mse")
    model.train_on_batch(np.array([["a", "a"], ["b", "c"]]), np.zeros((2, 1)))
    assert table.num_rows == 3
    rows = table.rows(["a", "b", "c", "d"])
    # Each gradient is 2 * output / batch size, in parts.
    np.testing.assert_allclose(rows[:, 0], [1 - 4, 1 - 2, 1 - 2, 1])


def test_a_full_table_keeps_its_rows(strategy):
    model, tables = make_model(strategy, lambda value: dynamic(value, max_rows=10))
    model.fit(batches(num_batches=4), verbose=0)
    table = tables[0]
    made = np.concatenate([ids for ids, _ in table.items()])
    assert len(made) == table.num_rows <= 10
    model.fit(batches(1, num_batches=4), verbose=0)
    assert set(made) <= set(np.concatenate([ids for ids, _ in table.items()]))
    missing = np.setdiff1d(np.arange(HEIGHT), made)
    assert table.num_rows <= 10
    np.testing.assert_allclose(table.rows(missing[-5:]), 0.1)


def test_a_summary_counts_the_rows_that_there_are(strategy):
    """Nested, also in a class, with the optimizer's slots: no reserve is counted."""

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([keras.Input((3,), dtype="int64"), dynamic(0.1)])
            self.last = keras.layers.Dense(1)

        def call(self, ids):
            return self.last(keras.ops.sum(self.inner(ids), axis=1))

    with strategy.scope():
        model = Outer()
        model.compile("adagrad", "mse")
    model.train_on_batch(np.array([[1, -2, 2**40]]), np.array([[1.0]]))
    lines = []
    model.summary(print_fn=lambda line, **unused: lines.append(line), line_length=80)
    text = "\n".join(lines)
    rows, dense = 3 * WIDTH, WIDTH + 1
    assert (model.inner.count_params(), model.count_params()) == (rows, rows + dense)
    # The optimizer has a slot of each, an iteration and a learning rate.
    assert f"Total params: {2 * (rows + dense) + 2} ({(2 * (rows + dense)) * 4 + 12}.00 B)" in text
    assert f"Trainable params: {rows + dense} ({(rows + dense) * 4}.00 B)" in text


def test_a_status_has_the_rows_that_are_there_meanwhile(strategy):
    model, tables = make_model(strategy, dynamic, OPTIMIZERS["momentum"]())
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 10:
                rows = {table.embeddings.path: table.num_rows for table in tables}
                wait_for(lambda: rows_in(strategy.status()) == rows, what="the rows in a status")
                seen.append((strategy.status(), strategy.placement(), sum(rows.values())))

    def rows_in(status):
        known = {table.name: table for table in status.tables}
        return {path: known[path].num_rows for path in (t.embeddings.path for t in tables)}

    model.fit(batches(), verbose=0, callbacks=[Look()])
    ((status, placement, num_rows),) = seen
    paths = [table.embeddings.path for table in tables]
    of_tables = [table for table in status.tables if table.name in paths]
    assert sum(table.num_bytes for table in of_tables) == num_rows * 4 * WIDTH
    # With a slot each; the steps after it made more rows.
    at_end = sum(table.num_rows for table in tables)
    assert sum(sum(t.embeddings.bytes_by_ps()) for t in tables) == 2 * at_end * 4 * WIDTH
    assert all(path in ps.names for ps in placement for path in paths)
    # Tables of earlier tests may be there too.
    assert placement.looked_up.table_bytes >= 2 * num_rows * 4 * WIDTH


def test_rows_are_loaded_from_arrays(strategy):
    _, (table, other, _) = make_model(strategy, dynamic)
    ids = np.array([5, -7, 2**60])
    rows = np.arange(3 * WIDTH, dtype="float32").reshape(3, WIDTH)
    table.load_rows(ids, rows)
    np.testing.assert_array_equal(table.rows(ids[::-1]), rows[::-1])
    assert (table.num_rows, other.num_rows) == (3, 0)


def test_a_table_begins_empty_where_another_one_was(strategy):
    model, tables = make_model(strategy, dynamic)
    model.fit(batches(num_batches=2), verbose=0)
    # One table is left, so its pool is too.
    (kept, *_) = tables
    number = kept.num_rows
    del model, tables
    keras.backend.clear_session()
    gc.collect()
    _, new = make_model(strategy, dynamic)
    assert [table.num_rows for table in new] == [0, 0, 0]
    assert kept.num_rows == number


def test_room_for_rows_costs_no_memory(strategy):
    def resident():
        return sum(task.memory_info().rss for task in psutil.Process().children(recursive=True))

    before = resident()
    with strategy.scope():
        table = DynamicEmbedding(32)
        table(np.array([1]))
    assert table.num_rows == 0
    assert resident() - before < 300 << 20


REFUSED = {
    "couples the rows": lambda: keras.optimizers.Lamb(),
    "would have an element for each row": lambda: keras.optimizers.Adafactor(),
    "`use_ema=True` changes rows": lambda: keras.optimizers.Adam(use_ema=True),
    "`gradient_accumulation_steps` changes rows": lambda: keras.optimizers.SGD(
        gradient_accumulation_steps=2
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_optimizers_that_need_other_rows_are_refused(strategy, message):
    model, _ = make_model(strategy, dynamic, REFUSED[message]())
    with pytest.raises(kerasps.UnsupportedError, match=message):
        model.fit(batches(num_batches=2), verbose=0)


def test_a_gradient_outside_of_a_step_is_refused(strategy):
    with strategy.scope():
        table = dynamic(1.0)
        table(np.array([1]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table(np.array([1, 2])))
    with pytest.raises(kerasps.UnsupportedError, match="whose rows only a step makes"):
        tape.gradient(loss, table.trainable_weights)


def test_the_whole_value_is_refused(strategy):
    _, (table, *_) = make_model(strategy, dynamic)
    with pytest.raises(kerasps.UnsupportedError, match="as a whole is asked for"):
        np.asarray(table.embeddings)
