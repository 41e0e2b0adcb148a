"""Kinds of model and optimizer once, on a cluster inside this process: equal to plain Keras.

The second worker has no data, so updates come in plain Keras's order.
"""

from __future__ import annotations

import contextlib
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
from support.models import Examples, counting_model, ids_data
from support.optimizers import OPTIMIZERS


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
