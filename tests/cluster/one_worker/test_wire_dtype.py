"""Values and gradients that travel in 16 bits: they are rounded once, and all else is exact."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.step.records import specs
from kerasps.variables.placing.placement import PlacementLedger
from kerasps.variables.storage.wire import WireRule
from support.matrix import with_matrix

THIRD = np.float32(1 / 3)
NUM_ROWS, STEPS = 64, 4
IDS = np.arange(2 * STEPS, dtype="int32").reshape(STEPS, 2)


class Weights(keras.layers.Layer):
    """Returns its weights for each example, and counts the steps in thirds."""

    def __init__(self, size, **arguments):
        super().__init__(**arguments)
        self.kernel = self.add_weight(shape=(size, 3), initializer="normal", name="kernel")
        self.thirds = self.add_weight(shape=(), initializer="zeros", trainable=False, name="thirds")

    def call(self, inputs, training=False):
        if training:
            self.thirds.assign_add(THIRD)
        return tf.tile(keras.ops.reshape(self.kernel, (1, -1)), [tf.shape(inputs)[0], 1])


class Thirds(keras.losses.Loss):
    """Has a gradient of a third with respect to each output."""

    def call(self, y_true, y_pred):
        return tf.reduce_sum(y_pred * THIRD, axis=tuple(range(1, y_pred.shape.rank)))


@pytest.fixture
def model_of(strategy, monkeypatch):
    """Returns what makes a model whose variables travel as a rule says."""

    def make(*choices, steps_per_execution=2, num_tables=1):
        monkeypatch.setattr(strategy.extended, "wire_rule", WireRule(choices))
        # On the same ps each time, whatever was made before.
        monkeypatch.setattr(strategy.extended, "ledger", PlacementLedger(strategy.num_ps))
        with strategy.scope():
            ids = keras.Input((2,), dtype="int32")
            tables = [
                keras.layers.Embedding(NUM_ROWS, 4, "normal", name=f"table_{number}")
                for number in range(num_tables)
            ]
            outputs = [Weights(50, name="first")(ids), Weights(20, name="second")(ids)]
            model = keras.Model(ids, [*outputs, *(table(ids) for table in tables)])
            model.compile(
                keras.optimizers.SGD(1.0),
                [Thirds(reduction="sum")] * len(model.outputs),
                steps_per_execution=steps_per_execution,
            )
        return model

    return make


def fit(model):
    """Train for one epoch; each step looks up two rows of each table, and no other does."""
    targets = tuple(np.zeros(STEPS, "float32") for _ in model.outputs)
    model.fit(tf.data.Dataset.from_tensor_slices((IDS, targets)).batch(1), verbose=0)


def rounded(value, dtype):
    return tf.cast(tf.cast(value, dtype), tf.float32).numpy()


DTYPES = ("bfloat16", "float16")
CASES = {
    "small": {},
    "large": {"large": True},
    "shards": {"num_shards": 2},
    "large shards": {"large": True, "num_shards": 2},
    "tables in a group": {"num_tables": 3},
}


@pytest.fixture
def case(request, sharded, monkeypatch):
    """Returns the arguments of `model_of`, for values that travel in each way."""
    arguments = dict(CASES[request.param])
    if arguments.pop("large", False):
        monkeypatch.setattr(specs, "LARGE_BYTES", 8)
    sharded(arguments.pop("num_shards", 1), min_bytes=0)
    return arguments


# Each case with one type in turn.
@pytest.mark.parametrize(
    ("case", "dtype"),
    with_matrix(
        itertools.product(CASES, DTYPES),
        at_length=[(case, DTYPES[index % 2]) for index, case in enumerate(CASES)],
    ),
    indirect=["case"],
)
def test_values_and_gradients_are_rounded_once_and_stored_in_full(model_of, case, dtype):
    model = model_of(("", dtype), **case)
    before = [value.copy() for value in model.get_weights()]
    fit(model)
    gradient = rounded(THIRD, dtype)
    assert gradient != THIRD
    for variable, old, new in zip(model.weights, before, model.get_weights(), strict=True):
        assert variable.dtype == new.dtype == "float32"
        if not variable.trainable:
            expected = np.float32(0)
            for _ in range(STEPS):
                expected += THIRD
        elif variable.path.startswith("table"):
            expected = old.copy()
            expected[: 2 * STEPS] -= gradient  # each row in one step
        else:
            expected = old.copy()
            for _ in range(STEPS):
                expected -= gradient
        np.testing.assert_array_equal(new, expected, err_msg=variable.path)
    assert int(model.optimizer.iterations) == STEPS
    first, second, *rows = model.predict(IDS, verbose=0)
    weights = {variable.path: variable.numpy() for variable in model.weights}
    for output, name in ((first, "first"), (second, "second")):
        np.testing.assert_array_equal(output[0], rounded(weights[f"{name}/kernel"], dtype).ravel())
    for number, output in enumerate(rows):
        table = weights[f"table_{number}/embeddings"]
        np.testing.assert_array_equal(output, rounded(table[IDS], dtype))


def test_the_first_part_of_a_path_that_fits_decides(model_of):
    model = model_of(("first", None), ("kernel", "float16"), ("table", "bfloat16"))
    before = dict(zip((v.path for v in model.weights), model.get_weights(), strict=True))
    fit(model)
    for variable in model.trainable_variables:
        steps = 1 if variable.path.startswith("table") else STEPS
        dtype = {"first/kernel": "float32", "second/kernel": "float16"}.get(
            variable.path, "bfloat16"
        )
        expected = before[variable.path][: 2 * STEPS].copy()
        for _ in range(steps):
            expected -= rounded(THIRD, dtype)
        np.testing.assert_array_equal(variable.numpy()[: 2 * STEPS], expected, variable.path)


def test_a_step_moves_half_the_bytes(model_of):
    traffic = []
    for choices in ((), (("", "bfloat16"),)):
        model = model_of(*choices)
        fit(model)
        traffic.append(model.train_function.traffic)
    full, half = traffic
    kernels = 4 * 3 * (50 + 20)
    for direction in ("dense_read", "dense_written"):
        difference = sum(getattr(full, direction).values()) - sum(getattr(half, direction).values())
        assert difference == kernels / 2, direction
    assert [table.row_bytes for table in half.tables] == [
        table.row_bytes / 2 for table in full.tables
    ]


def test_a_scaled_loss_trains(strategy, monkeypatch):
    monkeypatch.setattr(strategy.extended, "wire_rule", WireRule((("", "bfloat16"),)))
    x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
    y = x[:, :1] * 2 - x[:, 1:2]
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)]
            )
            model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=4)
    finally:
        keras.config.set_dtype_policy(policy)
    losses = model.fit(x, y, batch_size=16, epochs=6, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] / 4


class Factor(keras.losses.Loss):
    """Has a gradient of y with respect to each output."""

    def call(self, y_true, y_pred):
        return tf.reduce_sum(y_true * y_pred, axis=tuple(range(1, y_pred.shape.rank)))


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize(
    ("clip", "wire_dtype", "factor", "is_skipped"),
    [
        ({}, "float16", 1e5, True),
        ({}, "float16", 6e4, False),
        ({"clipvalue": 1.0}, "float16", 1e5, False),
        ({}, "bfloat16", 1e5, False),
    ],
)
def test_a_scaled_loss_sees_a_gradient_that_becomes_infinite_when_it_is_sent(
    strategy, monkeypatch, clip, wire_dtype, factor, is_skipped, is_table
):
    """The step is skipped and the scale halved, as in plain Keras for an infinite gradient."""
    monkeypatch.setattr(strategy.extended, "wire_rule", WireRule((("", wire_dtype),)))
    with strategy.scope():
        ids = keras.Input((2,), dtype="int32")
        layer = keras.layers.Embedding(NUM_ROWS, 3, "zeros") if is_table else Weights(6)
        model = keras.Model(ids, keras.layers.Reshape((-1,))(layer(ids)))
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1e-4, **clip), initial_scale=8.0
        )
        model.compile(optimizer, Factor(reduction="sum"), steps_per_execution=2)
    num_outputs = model.output_shape[1] or 18
    y = np.ones((2, num_outputs), "float32")
    y[0] *= factor
    before = np.array(model.trainable_variables[0])
    model.fit(np.array([[1, 2], [3, 4]], "int32"), y, batch_size=1, shuffle=False, verbose=0)
    assert float(optimizer.dynamic_scale) == (4.0 if is_skipped else 8.0)
    assert int(optimizer.iterations) == (1 if is_skipped else 2)
    change = np.array(model.trainable_variables[0]) - before
    assert np.all(np.isfinite(change))
    large = change[1] if is_table else change
    assert np.all(np.abs(large) < 1e-3) == (is_skipped or bool(clip))
