"""Tables that a step reads by rows: equal to plain Keras, for any number of shards, layout and
number of ps.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.compare import assert_equal, assert_identical, dataset, train_both
from support.matrix import with_matrix
from support.optimizers import NOT_ELEMENTWISE, OPTIMIZERS, RowRatios
from support.tables import EXACT, WIDTH, compiled, is_table

NUM_ROWS = 70
LAZY = [
    name for name in OPTIMIZERS if name not in (*EXACT, "adafactor", "lamb", "muon", "loss_scale")
]


def id_data(num_ids=4, num_rows=NUM_ROWS):
    generator = np.random.default_rng(0)
    # Squared, so that low ids are frequent and repeat within a batch.
    ids = (generator.random((320, num_ids)) ** 2 * num_rows).astype("int32")
    return ids, np.sin(ids.sum(1, keepdims=True)).astype("float32")


def one_table(
    optimizer="sgd", steps_per_execution=5, num_ids=4, policy=None, compile_arguments=None, **table
):
    inputs = keras.Input((num_ids,), dtype="int32")
    if policy is not None:
        table["dtype"] = keras.DTypePolicy(policy)
    rows = keras.layers.Embedding(NUM_ROWS, WIDTH, name="table", **table)(inputs)
    together = (
        keras.layers.GlobalAveragePooling1D() if table.get("mask_zero") else keras.layers.Flatten()
    )
    outputs = keras.layers.Dense(1)(together(rows))
    return compiled(
        keras.Model(inputs, outputs), optimizer, steps_per_execution, **(compile_arguments or {})
    )


@pytest.mark.parametrize(
    ("optimizer", "num_shards"),
    with_matrix(
        [("adagrad", 1), ("adagrad", 2), ("adagrad", 3), ("sgd", 3)],
        at_length=[("adagrad", 1), ("adagrad", 2)],
    ),
)
def test_table_is_bit_equal_to_plain_keras(strategy, sharded, optimizer, num_shards):
    sharded(num_shards)
    plain, ours = train_both(
        strategy, lambda: one_table(optimizer), id_data(), sum_repeated_ids=True
    )
    table = ours.get_layer("table").embeddings
    assert is_table(ours, table)
    assert len(table.shards) == num_shards
    assert_identical(plain, ours)


# Those with one slot, two, three, and with a scalar of their own.
LAZY_KINDS = ["momentum", "adam", "nadam", "ftrl"]


@pytest.mark.parametrize(
    ("optimizer", "num_shards"),
    with_matrix(
        [*((name, 3) for name in LAZY), ("adam", 1)],
        at_length=[(name, 3) for name in LAZY if name not in LAZY_KINDS],
    ),
)
def test_lazy_update_equals_its_reference(strategy, sharded, optimizer, num_shards):
    lazy = strategy.options.sparse_updates == "lazy"
    sharded(num_shards)
    plain, ours = train_both(
        strategy, lambda: one_table(optimizer), id_data(), sum_repeated_ids=True, lazy=lazy
    )
    assert is_table(ours, ours.get_layer("table").embeddings)
    assert_equal(plain, ours)


def several_tables(optimizer):
    users, items = (
        keras.Input((2,), dtype="int32", name="users"),
        keras.Input((), dtype="int64", name="items"),
    )
    narrow = keras.layers.Embedding(NUM_ROWS, WIDTH, name="narrow")
    wide = keras.layers.Embedding(40, 2 * WIDTH, name="wide")
    # One table is looked up twice, with ids of two dtypes; the other once, by ids that are worked
    # out in the model.
    both = [
        keras.layers.Flatten()(narrow(users)),
        narrow(items),
        wide(keras.ops.sum(users, axis=1) % 40),
    ]
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(both))
    return compiled(keras.Model({"users": users, "items": items}, outputs), optimizer)


def several_data():
    ids, y = id_data(3)
    return {"users": ids[:, :2], "items": ids[:, 2].astype("int64")}, y


@pytest.mark.parametrize(
    ("optimizer", "num_shards"),
    with_matrix(
        [("sgd", 2), ("adagrad", 1), ("adagrad", 2), ("adam", 2)],
        at_length=[("adagrad", 1), ("adagrad", 2), ("sgd", 2)],
    ),
)
def test_several_tables_and_one_looked_up_twice_equal_plain_keras(
    strategy, sharded, optimizer, num_shards
):
    sharded(num_shards)
    lazy = optimizer == "adam" and strategy.options.sparse_updates == "lazy"
    plain, ours = train_both(
        strategy,
        lambda: several_tables(optimizer),
        several_data(),
        sum_repeated_ids=True,
        lazy=lazy,
    )
    assert all(is_table(ours, ours.get_layer(name).embeddings) for name in ("narrow", "wide"))
    assert_equal(plain, ours) if lazy else assert_identical(plain, ours)


HEIGHTS = [30, 50, 70, 12, 25, 40]


def grouped_tables(optimizer):
    """A model of tables of which most are updated alike; some have a way of their own."""
    inputs = [keras.Input((2,), dtype="int32" if i % 2 else "int64") for i in range(len(HEIGHTS))]
    arguments = [
        {"embeddings_initializer": "zeros"},
        {"embeddings_initializer": keras.initializers.RandomNormal(seed=3)},
        {"mask_zero": True},
        {"trainable": False},
        {
            # A constraint is put on the rows that a step touches, so all begin within it.
            "embeddings_constraint": keras.constraints.NonNeg(),
            "embeddings_initializer": keras.initializers.RandomUniform(0.0, 0.1, seed=4),
        },
        {},
    ]
    layers = [
        keras.layers.Embedding(height, WIDTH, name=f"table_{number}", **keywords)
        for number, (height, keywords) in enumerate(zip(HEIGHTS, arguments, strict=True))
    ]
    pool = keras.layers.GlobalAveragePooling1D()
    found = [pool(layer(ids)) for layer, ids in zip(layers, inputs, strict=True)]
    # Shared: looked up again, by ids of another table.
    found.append(pool(layers[2](inputs[0])))
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(found))
    return compiled(keras.Model(inputs, outputs), optimizer)


def grouped_data():
    generator = np.random.default_rng(1)
    ids = [
        (generator.random((320, 2)) ** 2 * height).astype("int32" if i % 2 else "int64")
        for i, height in enumerate(HEIGHTS)
    ]
    for drawn in ids:
        drawn[:, -1] = np.maximum(drawn[:, -1], 1)  # the mean of what is all masked is no number
    return tuple(ids), np.sin(sum(ids).sum(1, keepdims=True)).astype("float32")


@pytest.mark.parametrize(
    ("optimizer", "num_shards"),
    with_matrix(
        [
            *(("sgd", 1), ("adagrad", 1), ("adagrad", 2), ("adagrad", 3), ("adam", 2)),
            *(("momentum", 1), ("adamw", 1), ("ftrl", 2)),
        ],
        at_length=[
            *(("adagrad", 1), ("adagrad", 2), ("adam", 2), ("momentum", 1), ("adamw", 1)),
            *(("ftrl", 2), ("sgd", 1)),
        ],
    ),
)
def test_groups_of_tables_equal_plain_keras(strategy, sharded, optimizer, num_shards):
    sharded(num_shards)
    lazy = optimizer not in EXACT and strategy.options.sparse_updates == "lazy"
    plain, ours = train_both(
        strategy,
        lambda: grouped_tables(optimizer),
        grouped_data(),
        sum_repeated_ids=True,
        lazy=lazy,
    )
    tables = [ours.get_layer(f"table_{number}").embeddings for number in range(len(HEIGHTS))]
    assert all(is_table(ours, table) for table in tables)
    assert all(np.isfinite(v.numpy()).all() for v in ours.weights)
    assert_identical(plain, ours) if optimizer in EXACT else assert_equal(plain, ours)


def test_rows_of_each_table_of_a_group_are_counted(strategy, sharded):
    sharded(2)
    with strategy.scope():
        model = grouped_tables("adagrad")
    ids, y = grouped_data()
    # Two different rows of each table in each step, of the shared one four.
    ids = [np.full_like(drawn, 2 * number) + np.arange(2) for number, drawn in enumerate(ids)]
    model.fit(dataset((tuple(ids), y)), steps_per_epoch=10, verbose=0)
    report = strategy.load_report()
    rows = {}
    for task in report:
        for name, rate in task.hottest_tables:
            rows[name] = rows.get(name, 0) + rate * report.seconds / report.steps
    assert rows[model.get_layer("table_2").embeddings.path] == pytest.approx(4)
    total = sum(task.rows_read_per_second for task in report) * report.seconds / report.steps
    written = sum(task.rows_written_per_second for task in report) * report.seconds / report.steps
    assert (total, written) == (pytest.approx(14), pytest.approx(12))


def test_dense_variables_in_shards_equal_plain_keras(strategy, sharded):
    sharded(3)
    x = np.random.default_rng(0).normal(size=(320, 40)).astype("float32")
    data = (x, np.tanh(x[:, :1]))

    def make():
        layers = [
            keras.Input((40,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.BatchNormalization(),
        ]
        return compiled(keras.Sequential([*layers, keras.layers.Dense(1)]), "adam")

    plain, ours = train_both(strategy, make, data)
    kernel = ours.layers[0].kernel
    assert [tuple(shard.shape) for shard in kernel.shards] == [(14, 32), (13, 32), (13, 32)]
    assert [len(v.shards) for v in ours.optimizer.variables if v.shape == kernel.shape] == [3, 3]
    assert_equal(plain, ours)


def test_slots_lie_beside_their_rows(strategy, sharded):
    sharded(3)
    with strategy.scope():
        model = one_table("adam")
        model.optimizer.build(model.trainable_variables)
    table = model.get_layer("table").embeddings
    slots = [v for v in model.optimizer.variables if v.shape == table.shape]
    assert len(slots) == 2
    for slot in slots:
        assert [s.device for s in slot.shards] == [s.device for s in table.shards]
        assert [s.shape for s in slot.shards] == [s.shape for s in table.shards]


def test_a_sharded_variable_is_one_variable_to_keras(strategy, sharded):
    sharded(3)
    with strategy.scope():
        model = one_table()
    table = model.get_layer("table").embeddings
    assert isinstance(table, keras.Variable)
    assert model.weights[0] is table
    assert tuple(table.shape) == (NUM_ROWS, WIDTH)
    assert model.count_params() == NUM_ROWS * WIDTH + 4 * WIDTH + 1
    value = np.random.default_rng(0).normal(size=table.shape).astype("float32")
    table.assign(value)
    np.testing.assert_array_equal(table.numpy(), value)
    np.testing.assert_array_equal(model.get_weights()[0], value)
    np.testing.assert_array_equal(np.asarray(table), value)
    np.testing.assert_array_equal(keras.ops.take(table, [3, -1], axis=0), value[[3, -1]])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(table + 1), value + 1)
    table.assign_add(value)
    np.testing.assert_array_equal(table.numpy(), 2 * value)
    names = {name for task in strategy.placement() for name in task.names}
    assert {shard.name for shard in table.shards} <= names
    with pytest.raises(ValueError, match="shape"):
        table.assign(value[:-1])


class Reader(keras.Model):
    """Reads a table in a way of its own."""

    def __init__(self, read, rows=NUM_ROWS, **kwargs):
        super().__init__(**kwargs)
        self.table = self.add_weight(shape=(rows, WIDTH), initializer="uniform", name="table")
        self.out = keras.layers.Dense(1)
        self.read = read

    def call(self, ids):
        return self.out(self.read(self.table, ids))


WAYS = {
    "take": lambda table, ids: keras.ops.mean(keras.ops.take(table, ids, axis=0), axis=1),
    "negative": lambda table, ids: keras.ops.mean(
        keras.ops.take(table, ids - NUM_ROWS, axis=0), axis=1
    ),
    "gather": lambda table, ids: tf.reduce_mean(tf.gather(table, ids), axis=1),
    "embedding_lookup": lambda table, ids: tf.reduce_mean(
        tf.nn.embedding_lookup(table, ids), axis=1
    ),
    "embedding_lookup_sparse": lambda table, ids: tf.nn.embedding_lookup_sparse(
        table if hasattr(table, "device") else table.value,
        tf.sparse.from_dense(ids),
        None,
        combiner="sum",
    ),
    "ragged": lambda table, ids: tf.reduce_mean(
        keras.ops.take(table, tf.RaggedTensor.from_tensor(ids, lengths=ids[:, 0] % 4 + 1), axis=0),
        axis=1,
    ),
    "sparse": lambda table, ids: keras.ops.mean(
        keras.ops.take(table, tf.sparse.from_dense(ids), axis=0), axis=1
    ),
}


@pytest.mark.parametrize(
    ("way", "num_shards"),
    with_matrix(
        [*((way, 2) for way in WAYS), ("take", 1), ("ragged", 1)],
        # Bags are looked up in these ways too (see `test_bags.py`).
        at_length=[
            *(("gather", 2), ("embedding_lookup", 2), ("embedding_lookup_sparse", 2)),
            *(("take", 2), ("ragged", 1)),
        ],
    ),
)
def test_way_of_reading_equals_plain_keras(strategy, sharded, way, num_shards):
    sharded(num_shards)
    # From 1, so that there is a first entry in each row of a sparse tensor.
    ids, y = id_data(num_rows=NUM_ROWS - 1)
    plain, ours = train_both(
        strategy,
        lambda: compiled(Reader(WAYS[way]), "adagrad"),
        (ids + 1, y),
        sum_repeated_ids=True,
    )
    assert is_table(ours, ours.table)
    assert_equal(plain, ours)


class Chained(keras.Model):
    """Ids of one table follow from a dense weight, those of another from rows of the first."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = keras.layers.Embedding(NUM_ROWS, WIDTH, name="first")
        self.second = keras.layers.Embedding(20, WIDTH, name="second")
        self.out = keras.layers.Dense(1)
        self.offset = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(0.6), trainable=False, name="offset"
        )

    def call(self, ids):
        shifted = (ids + keras.ops.cast(keras.ops.round(self.offset), "int32")) % NUM_ROWS
        rows = self.first(shifted)
        buckets = keras.ops.cast(keras.ops.abs(rows[..., 0]) * 1000, "int32") % 20
        return self.out(keras.ops.mean(rows + self.second(buckets), axis=1))


def test_ids_that_follow_from_weights_and_rows_equal_plain_keras(strategy, sharded):
    sharded(2)
    plain, ours = train_both(
        strategy, lambda: compiled(Chained(), "adagrad"), id_data(), sum_repeated_ids=True
    )
    assert is_table(ours, ours.first.embeddings)
    assert is_table(ours, ours.second.embeddings)
    assert_identical(plain, ours)


class Tied(keras.Model):
    """The table is read by rows, and whole for the outputs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.Embedding(NUM_ROWS, WIDTH)

    def call(self, ids):
        hidden = keras.ops.mean(self.table(ids), axis=1)
        return keras.ops.matmul(hidden, keras.ops.transpose(self.table.embeddings))


def test_tied_weights_equal_plain_keras(strategy, sharded):
    sharded(2)
    ids, _ = id_data()

    def make():
        model = Tied()
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=5,
        )
        return model

    plain, ours = train_both(strategy, make, (ids, ids[:, 0]))
    assert not is_table(ours, ours.table.embeddings)
    assert_equal(plain, ours)


class InFunctions(keras.Model):
    """Looks rows up in a function that TensorFlow calls as it likes."""

    def __init__(self, call_all, **kwargs):
        super().__init__(**kwargs)
        self.table = keras.layers.Embedding(NUM_ROWS, WIDTH)
        self.out = keras.layers.Dense(1)
        self.call_all = call_all

    def call(self, ids):
        return self.out(self.call_all(lambda row: tf.reduce_mean(self.table(row), -2), ids))


CALLS = {
    "map_fn": lambda call, ids: tf.map_fn(call, ids, fn_output_signature=tf.float32),
    "vectorized_map": tf.vectorized_map,
    "recompute_grad": lambda call, ids: tf.recompute_grad(lambda one: call(ids) * one)(1.0),
}


@pytest.mark.parametrize("way", CALLS)
def test_look_ups_in_functions_equal_plain_keras(strategy, sharded, way):
    sharded(2)
    plain, ours = train_both(
        strategy,
        lambda: compiled(InFunctions(CALLS[way]), "adagrad"),
        id_data(),
        sum_repeated_ids=True,
    )
    assert not is_table(ours, ours.table.embeddings)
    assert_equal(plain, ours)


OPTIONS = {
    "mask_zero": ({"mask_zero": True}, {}),
    "non_neg": ({"embeddings_constraint": "non_neg"}, {}),
    "max_norm": ({"embeddings_constraint": keras.constraints.MaxNorm(0.1, axis=1)}, {}),
    "bfloat16": ({"policy": "mixed_bfloat16"}, {}),
    "xla": ({}, {"jit_compile": True}),
}


@pytest.mark.parametrize(
    ("option", "num_shards"),
    with_matrix(
        [*((option, 2) for option in OPTIONS), ("mask_zero", 1), ("xla", 1)],
        at_length=[("mask_zero", 2), ("non_neg", 2), ("xla", 1)],
    ),
)
def test_option_of_the_layer_equals_plain_keras(strategy, sharded, option, num_shards):
    sharded(num_shards)
    table, compile_arguments = OPTIONS[option]
    plain, ours = train_both(
        strategy,
        lambda: one_table("adagrad", compile_arguments=compile_arguments, **table),
        id_data(),
        sum_repeated_ids=True,
        lazy=strategy.options.sparse_updates == "lazy",
    )
    assert is_table(ours, ours.get_layer("table").embeddings)
    assert_equal(plain, ours, relative=1e-3 if option == "bfloat16" else 1e-5)


OPTIMIZER_OPTIONS = {
    "clipnorm": {"clipnorm": 0.02},
    "clipvalue": {"clipvalue": 0.005},
    "global_clipnorm": {"global_clipnorm": 0.02},
    "weight_decay": {"weight_decay": 0.05},
    "ema": {"use_ema": True, "ema_momentum": 0.9},
    "loss_scale_factor": {"loss_scale_factor": 64.0},
}


# Each with one optimizer in turn: SGD without slots, Adam with two.
@pytest.mark.parametrize(
    ("option", "optimizer"),
    [
        pytest.param(
            option,
            (keras.optimizers.SGD, keras.optimizers.Adam)[index % 2],
            marks=pytest.mark.matrix if option in ("clipvalue", "loss_scale_factor") else (),
        )
        for index, option in enumerate(OPTIMIZER_OPTIONS)
    ],
)
def test_option_of_the_optimizer_equals_its_reference(strategy, sharded, option, optimizer):
    sharded(2)
    plain, ours = train_both(
        strategy,
        lambda: one_table(optimizer(0.02, **OPTIMIZER_OPTIONS[option])),
        id_data(),
        sum_repeated_ids=True,
        lazy=strategy.options.sparse_updates == "lazy",
    )
    assert is_table(ours, ours.get_layer("table").embeddings)
    assert_equal(plain, ours)


WHOLE = {
    "accumulation": lambda: keras.optimizers.Adam(0.02, gradient_accumulation_steps=4),
    "ema_overwrite": lambda: keras.optimizers.SGD(
        0.02, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7
    ),
}


@pytest.mark.parametrize(
    ("name", "num_shards"),
    with_matrix(
        [("accumulation", 1), ("accumulation", 3), ("ema_overwrite", 3)],
        at_length=[("accumulation", 1), ("ema_overwrite", 3)],
    ),
)
def test_optimizer_that_needs_the_whole_table_gets_it(strategy, sharded, name, num_shards):
    sharded(num_shards)
    plain, ours = train_both(
        strategy, lambda: one_table(WHOLE[name]()), id_data(), sum_repeated_ids=True
    )
    assert is_table(ours, ours.get_layer("table").embeddings)
    assert_equal(plain, ours)


COUPLED = {
    **{name: lambda name=name: one_table(name) for name in NOT_ELEMENTWISE},
    "constraint": lambda: one_table(
        "adam", embeddings_constraint=keras.constraints.MaxNorm(0.1, axis=0)
    ),
    "own_optimizer": lambda: one_table(RowRatios(0.05)),
    "accumulation_clipnorm": lambda: one_table(
        keras.optimizers.Adam(0.02, gradient_accumulation_steps=4, clipnorm=0.02)
    ),
}


@pytest.mark.parametrize(
    "name",
    with_matrix(COUPLED, at_length=["lamb", "muon", "own_optimizer", "accumulation_clipnorm"]),
)
def test_what_couples_rows_equals_plain_keras_on_a_whole_table(strategy, name):
    plain, ours = train_both(strategy, COUPLED[name], id_data(), sum_repeated_ids=True)
    assert is_table(ours, ours.get_layer("table").embeddings)
    assert_equal(plain, ours)


@pytest.mark.parametrize("name", [name for name in COUPLED if name != "muon"])
def test_what_couples_rows_of_a_table_in_shards_is_refused(strategy, sharded, name):
    sharded(3)
    with strategy.scope():
        model = COUPLED[name]()
    with pytest.raises(
        kerasps.UnsupportedError, match=r"couples the rows of 'table/embeddings', .* 3 shards"
    ):
        model.fit(*id_data(), verbose=0)


@pytest.mark.parametrize("name", [name for name in NOT_ELEMENTWISE if name == "muon"])
def test_muon_treats_the_rows_of_a_table_in_shards_alone(strategy, sharded, name):
    sharded(3)
    plain, ours = train_both(strategy, COUPLED[name], id_data(), sum_repeated_ids=True)
    assert is_table(ours, ours.get_layer("table").embeddings)
    assert_equal(plain, ours)


@pytest.mark.parametrize("num_shards", with_matrix([1, 2], at_length=[1]))
def test_global_norm_of_accumulated_gradients_of_a_table_equals_plain_keras(
    strategy, sharded, num_shards
):
    sharded(num_shards)
    optimizer = {"learning_rate": 0.02, "gradient_accumulation_steps": 4, "global_clipnorm": 0.02}
    plain, ours = train_both(
        strategy,
        lambda: one_table(keras.optimizers.Adam(**optimizer)),
        id_data(),
        sum_repeated_ids=True,
        steps=30,
    )
    assert_equal(plain, ours)


@pytest.mark.parametrize(
    ("num_shards", "bad"),
    with_matrix(
        itertools.product([1, 2], [NUM_ROWS, 2**31 - 1, -NUM_ROWS - 1, -(2**31)]),
        # Of each number of shards, one.
        at_length=[
            *((1, 2**31 - 1), (1, -NUM_ROWS - 1), (1, -(2**31))),
            *((2, NUM_ROWS), (2, 2**31 - 1), (2, -(2**31))),
        ],
    ),
)
def test_ids_out_of_range_are_refused_as_they_were_given(strategy, sharded, num_shards, bad):
    sharded(num_shards)
    ids, y = id_data()
    ids[5, 2] = bad
    with strategy.scope():
        model = one_table()
    with pytest.raises(
        kerasps.InputError, match=rf"'table/embeddings' has {NUM_ROWS} rows.*Received: id {bad}\."
    ):
        model.fit(
            kerasps.DatasetCreator(lambda context: dataset((ids, y))), steps_per_epoch=4, verbose=0
        )


def test_loss_scaling_of_a_table_equals_plain_keras(strategy, sharded):
    sharded(2)
    plain, ours = train_both(
        strategy,
        lambda: one_table(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=64.0)
        ),
        id_data(),
        steps=20,
    )
    assert is_table(ours, ours.get_layer("table").embeddings)
    assert_equal(plain, ours)


def test_a_frozen_table_is_read_by_rows_and_left_alone(strategy, sharded):
    sharded(2)

    def make():
        model = one_table("adagrad")
        model.get_layer("table").trainable = False
        return compiled(model, "adagrad")

    plain, ours = train_both(strategy, make, id_data())
    (table,) = {entry.is_written for entry in ours.train_function.traffic.tables}
    assert table is False
    assert_equal(plain, ours)


def test_load_report_counts_the_rows_of_each_ps(strategy, sharded):
    sharded(2)
    ids, y = id_data()
    with strategy.scope():
        model = one_table("adam")
    model.fit(
        kerasps.DatasetCreator(lambda context: dataset((ids, y))),
        steps_per_epoch=20,
        epochs=2,
        verbose=0,
    )
    report = strategy.load_report()
    different = 2 * sum(len(np.unique(batch)) for batch in ids.reshape(20, 16, 4))
    assert report.steps == 40
    assert round(sum(task.rows_read_per_second for task in report) * report.seconds) == different
    assert round(sum(task.rows_written_per_second for task in report) * report.seconds) == different
    assert (
        sum(task.bytes_read_per_second for task in report) * report.seconds > different * WIDTH * 4
    )
    assert {name for task in report for name, _ in task.hottest_tables} == {"table/embeddings"}
    assert "table/embeddings" in str(report)


def test_predict_and_evaluate_of_a_sharded_model(strategy, sharded):
    sharded(3)
    ids, y = id_data()
    plain, ours = train_both(
        strategy, lambda: one_table("adagrad"), (ids, y), sum_repeated_ids=True
    )
    np.testing.assert_allclose(
        ours.predict(ids, verbose=0), plain.predict(ids, verbose=0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        ours.evaluate(ids, y, verbose=0), plain.evaluate(ids, y, verbose=0), rtol=1e-5
    )


def test_train_on_batch_of_a_sharded_model(strategy, sharded):
    sharded(2)
    ids, y = id_data()
    keras.utils.set_random_seed(7)
    plain = one_table("sgd", num_ids=4)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        ours = one_table("sgd", num_ids=4)
    for model in (plain, ours):
        model.train_on_batch(ids[:16], y[:16])
    assert_equal(plain, ours)


@pytest.mark.parametrize(
    "regularizer",
    [
        pytest.param(keras.regularizers.L1(0.01), marks=pytest.mark.matrix),
        *("l2", keras.regularizers.L1L2(0.01, 0.02)),
    ],
)
def test_regularizer_sees_the_rows_of_the_step(strategy, sharded, regularizer):
    sharded(2)
    generator = np.random.default_rng(0)
    ids = np.concatenate([generator.permutation(16) for _ in range(20)]).astype("int32")[
        :, None
    ]  # each batch has all rows

    def make():
        layers = [
            keras.Input((1,), dtype="int32"),
            keras.layers.Embedding(16, WIDTH, embeddings_regularizer=regularizer),
        ]
        return compiled(
            keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(1)]), "sgd"
        )

    plain, ours = train_both(strategy, make, (ids, np.sin(ids)), sum_repeated_ids=True)
    assert is_table(ours, ours.layers[0].embeddings)
    assert_equal(plain, ours)
    np.testing.assert_allclose(
        ours.history.history["loss"], plain.history.history["loss"], rtol=1e-5
    )
