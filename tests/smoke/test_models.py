"""Kinds of model and optimizer once, on a cluster inside this process: equal to plain Keras.

The second worker has no data, so updates come in plain Keras's order.
"""

from __future__ import annotations

import contextlib
import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.errors import KeraspsError
from kerasps.step import TRAIN
from kerasps.step.phases import compute_phase
from kerasps.step.running.make_step import step_function
from kerasps.step.tracing.runners import RETURNING_WORKER
from support.compare import assert_equal, regression_data, train_both
from support.matrix import with_matrix
from support.models import Examples, counting_model, ids_data
from support.optimizers import OPTIMIZERS

NUM_ROWS = 70


def dense_model(optimizer, steps_per_execution=1):
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    return model


def table_model(optimizer="adagrad"):
    inputs = keras.Input((4,), dtype="int32")
    rows = keras.layers.Embedding(NUM_ROWS, 16, name="table")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile(OPTIMIZERS[optimizer](), "mse", steps_per_execution=5)
    return model


def id_data():
    ids = (np.random.default_rng(0).random((320, 4)) ** 2 * NUM_ROWS).astype("int32")
    return ids, np.sin(ids.sum(1, keepdims=True)).astype("float32")


@pytest.mark.parametrize(
    ("name", "steps_per_execution"),
    with_matrix(
        itertools.product(["sgd", "adam", "adagrad"], [1, 10]),
        at_length=[("sgd", 10), ("adam", 1), ("adagrad", 10)],
    ),
)
def test_optimizer_equals_plain_keras(strategy, name, steps_per_execution):
    plain, ours = train_both(
        strategy,
        lambda: dense_model(OPTIMIZERS[name](), steps_per_execution),
        regression_data(),
        steps=15,
    )
    assert_equal(plain, ours)
    assert int(ours.optimizer.iterations.numpy()) == 15


class CallCounter(keras.layers.Layer):
    """Counts in which traces it is called."""

    num_calls = 0

    def call(self, inputs):
        self.num_calls += 1
        return inputs


@pytest.mark.parametrize("is_functional", [True, False])
def test_metrics_by_name_cost_no_second_trace(strategy, is_functional):
    counter = CallCounter()
    layers = [counter, keras.layers.Dense(1)]
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), *layers])
        if is_functional:
            model = keras.Model(model.inputs, model.outputs[0])
        model.compile("adam", "mse", metrics=["mae", "accuracy"])
    counter.num_calls = 0
    history = model.fit(*regression_data(), verbose=0).history
    assert counter.num_calls == 1
    assert list(history) == ["accuracy", "loss", "mae"]


def test_a_sharded_table_equals_plain_keras(strategy, sharded):
    sharded(2)
    plain, ours = train_both(strategy, table_model, id_data(), steps=15, sum_repeated_ids=True)
    table = next(v for v in ours.variables if "table" in v.path)
    assert [shard.shape[0] for shard in table.shards] == [NUM_ROWS // 2] * 2
    assert {shard.device[:22] for shard in table.shards} == {
        f"/job:ps/replica:0/task:{index}"[:22] for index in (0, 1)
    }
    assert {t.name for t in ours.train_function.traffic.tables} == {table.path}
    assert_equal(plain, ours)


def test_a_train_step_of_ones_own_equals_plain_keras(strategy):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.seen = keras.metrics.Mean(name="seen")

        @property
        def metrics(self):
            return [self.seen]

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.abs(y - self(x, training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.seen.update_state(loss)
            return {"seen": self.seen.result()}

    def make():
        model = Own()
        model.compile(OPTIMIZERS["adam"](), steps_per_execution=4)
        return model

    plain, ours = train_both(strategy, make, regression_data(), steps=15)
    assert_equal(plain, ours)
    np.testing.assert_allclose(ours.history.history["seen"], plain.history.history["seen"], 1e-5)


class PartlyReporting(keras.Model):
    """Returns some of its metrics, one of them an entry of a result, and something else."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = keras.metrics.Mean("seen")
        self.unreported = keras.metrics.Sum("unreported")
        self.examples = Examples()

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.seen.update_state(loss)
        self.unreported.update_state(1.0)
        self.examples.update_state(y, None)
        return {
            "seen": self.seen.result(),
            "ids": self.examples.result()["ids"],
            "width": keras.ops.shape(x)[1],
        }


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_logs_that_are_some_of_the_metrics_equal_plain_keras(strategy, steps_per_execution):
    def make():
        model = PartlyReporting()
        model.compile(OPTIMIZERS["adam"](), steps_per_execution=steps_per_execution)
        return model

    plain, ours = train_both(strategy, make, regression_data(), steps=15)
    expected, logs = plain.history.history, ours.history.history
    assert logs.keys() == expected.keys() == {"seen", "ids", "width"}
    for name, values in expected.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-4)
    assert float(ours.unreported.result()) == float(plain.unreported.result()) > 0.0


def test_string_lookup_in_a_model_equals_plain_keras(strategy):
    words = [f"word{i}" for i in range(20)]

    def make():
        inputs = keras.Input((), dtype="string")
        ids = keras.layers.StringLookup(vocabulary=words)(inputs)
        rows = keras.layers.Embedding(21, 4)(ids)
        model = keras.Model(inputs, keras.layers.Dense(1)(rows))
        model.compile(OPTIMIZERS["adagrad"](), "mse")
        return model

    ids = np.arange(160) % 23  # some of which the vocabulary lacks
    data = np.array([f"word{i}" for i in ids]), np.sin(ids)[:, None].astype("float32")
    plain, ours = train_both(strategy, make, data, steps=15, sum_repeated_ids=True)
    assert_equal(plain, ours)


@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras"])
def test_what_is_saved_in_two_shards_is_loaded_in_plain_keras(strategy, sharded, tmp_path, name):
    sharded(2)
    data = id_data()
    with strategy.scope():
        ours = table_model("adam")
    ours.fit(*data, verbose=0)
    before = ours.get_weights()
    if name.endswith(".keras"):
        ours.save(tmp_path / name)
        plain = keras.models.load_model(tmp_path / name)
    else:
        ours.save_weights(tmp_path / name)
        plain = table_model("adam")
        plain.optimizer.build(plain.trainable_variables)
        plain.load_weights(tmp_path / name)
    assert_equal(plain, ours, relative=0.0)
    ours.fit(*data, verbose=0)
    assert not np.array_equal(ours.get_weights()[0], before[0])
    ours.load_weights(tmp_path / name)
    for value, expected in zip(ours.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_a_compute_phase_that_is_not_on_its_device_is_refused(strategy, monkeypatch):
    model = counting_model(strategy)
    x, _ = ids_data(8)
    spec = tf.TensorSpec([None, *x.shape[1:]]), tf.TensorSpec([None])
    step = step_function(model, TRAIN, spec, [("GPU:0",)])  # a trace takes no GPU

    def build(num_steps):
        return step.step_graph(
            None, num_steps, checked=False, runner=RETURNING_WORKER, devices=("GPU:0",)
        )

    build(1)
    without_devices = types.SimpleNamespace(
        **{name: getattr(tf, name) for name in ("name_scope", "zeros", "raw_ops")},
        device=lambda name: contextlib.nullcontext(),
    )
    monkeypatch.setattr(compute_phase, "tf", without_devices)
    with pytest.raises(KeraspsError, match=r"not on its device\. Expected: GPU:0\. Received: "):
        build(2)


class Smallest(keras.metrics.Metric):
    """The smallest error. Keras's `reset_state` sets it to zero, so only a new one is right."""

    def __init__(self):
        super().__init__(name="smallest")
        self.value = self.add_weight(name="value", initializer=keras.initializers.Constant(1e9))

    def update_state(self, y, predicted, sample_weight=None):
        errors = keras.ops.abs(keras.ops.cast(y, "float32") - predicted)
        self.value.assign(keras.ops.minimum(self.value, keras.ops.min(errors)))

    def result(self):
        return self.value + 0.0


@pytest.mark.parametrize("method", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_new_metrics_begin_with_their_initial_values_as_in_plain_keras(strategy, method):
    x, y = regression_data(num_examples=32)
    found = []
    for scope in (contextlib.nullcontext(), strategy.scope()):
        keras.utils.set_random_seed(1)
        with scope:
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Smallest()])
        values = []
        for _ in range(2):
            if method == "fit":
                values += model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["smallest"]
            elif method == "evaluate":
                logs = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
                values.append(logs["smallest"])
            else:
                values.append(getattr(model, method)(x, y, return_dict=True)["smallest"])
        found.append(values)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    assert 0 < found[0][0] < 1e9


def missing(num_batches=2):
    x, y = regression_data(num_examples=32)
    for _ in range(num_batches):
        yield {"given": x, "optional": None}, y


@pytest.mark.filterwarnings("ignore:.*ran out of data", "ignore:.*lives in this process")
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_none_for_an_optional_input_equals_plain_keras(strategy, steps_per_execution):
    class Sum(keras.layers.Layer):
        def call(self, given, optional=None):
            return given if optional is None else given + optional

    def make():
        keras.utils.set_random_seed(7)
        given = keras.Input((8,), name="given")
        optional = keras.Input((8,), name="optional", optional=True)
        outputs = keras.layers.Dense(1)(Sum()(given, optional))
        model = keras.Model({"given": given, "optional": optional}, outputs)
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
        return model

    plain = make()
    with strategy.scope():
        ours = make()
    batch = next(missing())
    numbers = []
    for model in (plain, ours):
        # Of more executions, two workers would do two at once.
        for _ in range(2):
            model.fit(missing(steps_per_execution), shuffle=False, verbose=0)
        numbers.append(model.evaluate(missing(), verbose=0))
        numbers.append(model.evaluate(*batch, verbose=0))
        numbers.append(float(model.train_on_batch(*batch)))
        numbers.append(model.predict_on_batch(batch[0]).sum())
    half = len(numbers) // 2
    np.testing.assert_allclose(numbers[half:], numbers[:half], 1e-5)
    # Plain Keras adds one to the iterations where a generator ends.
    assert_equal(plain, ours, optimizer=False)
