"""States that a step assigns, when two workers have pulled them before either pushes."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from kerasps.errors import UnsupportedError
from support.matrix import with_matrix

_names = itertools.count()
NUM_BATCHES = 8
LOW, HIGH = -0.05, 0.05


def meet(num_workers, name):
    """Wait, in the first step of each worker, until all workers have pulled."""
    with tf.device("/job:ps/replica:0/task:0/device:CPU:0"):
        arrived, may_go = (
            tf.raw_ops.FIFOQueueV2(
                component_types=[tf.int32], shapes=[[]], capacity=-1, shared_name=f"{name} {part}"
            )
            for part in ("arrived", "may go")
        )
        arrival = tf.raw_ops.QueueEnqueueV2(handle=arrived, components=[tf.constant(1)])
        with tf.control_dependencies([arrival]):
            number = tf.raw_ops.QueueSizeV2(handle=arrived)
        tokens = tf.fill([tf.where(number >= num_workers, num_workers, 0)], 1)
        release = tf.raw_ops.QueueEnqueueManyV2(handle=may_go, components=[tokens])
        with tf.control_dependencies([release]):
            return tf.raw_ops.QueueDequeueV2(handle=may_go, component_types=[tf.int32])[0]


class States(keras.layers.Layer):
    """Assigns a state of each kind."""

    def build(self, shape):
        def state(name, initial=0.0, shape=(), dtype="float32"):
            initializer = keras.initializers.Constant(initial)
            return self.add_weight(
                shape=shape, initializer=initializer, trainable=False, dtype=dtype, name=name
            )

        self.count = state("count", dtype="int32")
        self.in_branch = state("in_branch", dtype="int32")
        self.is_done = state("is_done", dtype="bool")
        self.shift, self.added, self.in_cond = (
            state(n, shape=(2,)) for n in ("shift", "added", "in_cond")
        )
        self.average = state("average", shape=(2,))
        self.largest = state("largest", -100.0, shape=(2,))
        self.smallest = state("smallest", 100.0, shape=(2,))
        self.unit = state("unit", 1.0, shape=(2,))
        self.seen = state("seen", shape=(16,), dtype="int32")

    def call(self, x, training=False):
        if training:
            self._assign(x)
        return x

    def _assign(self, x):
        mean = ops.mean(x, 0)
        self.count.assign_add(1)
        self.average.assign(self.average * 0.9 + mean * (1.0 - 0.9))
        self.largest.assign(ops.maximum(self.largest, ops.max(x, 0)))
        self.smallest.assign(ops.where(ops.min(x, 0) < self.smallest, ops.min(x, 0), self.smallest))
        self.unit.assign(self.unit / tf.norm(self.unit.value))
        ids = ops.cast(ops.reshape(x, (-1, 1)), "int32")
        self.seen.assign(ops.scatter_update(self.seen, ids, ops.ones_like(ids[:, 0])))
        self.shift.assign(ops.where(self.is_done, self.shift, -mean))
        self.added.assign_add(ops.where(self.is_done, ops.zeros(2), -mean))

        def first():
            self.in_cond.assign_sub(mean)
            self.in_branch.assign_add(1)
            return tf.constant(0)

        def later():
            self.in_branch.assign_add(1)
            return tf.constant(0)

        tf.cond(self.is_done.value, later, first)
        self.is_done.assign(True)


class Model(keras.Model):
    """Meets, and clips its weights after each update, as a WGAN does."""

    def __init__(self, num_workers):
        super().__init__()
        self.num_workers, self.gate = num_workers, f"gate {next(_names)}"
        self.states = States()
        self.spectral = keras.layers.SpectralNormalization(
            keras.layers.Dense(2, use_bias=False, kernel_initializer="ones"), power_iterations=4
        )
        self.out = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

    def call(self, x, training=False):
        return self.out(self.spectral(self.states(x, training=training), training=training))

    def train_step(self, data):
        x, y = data
        with tf.control_dependencies([meet(self.num_workers, self.gate)]):
            x = tf.identity(x)
        logs = super().train_step((x, y))
        kernel = self.out.kernel
        kernel.assign(ops.clip(kernel, LOW, HIGH))
        return logs


def batches():
    """Batches whose mean is 3."""
    half = np.random.default_rng(0).integers(-3, 4, size=(NUM_BATCHES, 2, 2))
    x = np.concatenate([3 + half, 3 - half], 1).reshape(-1, 2).astype(np.float32)
    return x, tf.data.Dataset.from_tensor_slices((x, np.zeros((len(x), 1)))).batch(4)


@pytest.mark.parametrize("steps_per_execution", with_matrix([1, 3], at_length=[1]))
def test_states_are_right_whoever_pushes_first(strategy, steps_per_execution):
    x, dataset = batches()
    with strategy.scope():
        model = Model(num_workers=strategy.num_workers)
        model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=steps_per_execution)
    model.fit(dataset, epochs=1, shuffle=False, verbose=0)
    states = {v.name: np.asarray(v) for v in model.states.variables}
    assert states["count"] == states["in_branch"] == NUM_BATCHES
    np.testing.assert_allclose(states["average"], [3 * (1 - 0.9**NUM_BATCHES)] * 2, rtol=1e-4)
    np.testing.assert_array_equal(states["largest"], x.max(0))
    np.testing.assert_array_equal(states["smallest"], x.min(0))
    np.testing.assert_allclose(states["unit"], [0.5**0.5] * 2, rtol=1e-5)
    np.testing.assert_array_equal(np.flatnonzero(states["seen"]), np.unique(x))
    for name in ("shift", "added", "in_cond"):
        np.testing.assert_allclose(states[name], [-3.0, -3.0], err_msg=name)
    kernel = np.asarray(model.out.kernel)
    assert (kernel >= LOW).all()
    assert (kernel <= HIGH).all()
    # The updates of the two first steps may come after both normalisations.
    np.testing.assert_allclose(np.linalg.norm(model.spectral.layer.kernel, 2), 1.0, atol=0.05)


class Bound(keras.metrics.Metric):
    """The largest error, or the smallest."""

    def __init__(self, name, start, bound, reduce):
        super().__init__(name=name)
        initializer = keras.initializers.Constant(start)
        self.bound = self.add_variable((), initializer=initializer, name="bound")
        self._start, self._bound_of, self._reduce = start, bound, reduce

    def update_state(self, y, predicted, sample_weight=None):
        error = self._reduce(ops.abs(ops.cast(y, "float32") - predicted))
        self.bound.assign(self._bound_of(self.bound, error))

    def result(self):
        return self.bound

    def reset_state(self):
        self.bound.assign(self._start)


def bounds():
    return [
        Bound("largest", 0.0, ops.maximum, ops.max),
        Bound("smallest", np.inf, ops.minimum, ops.min),
    ]


class Perplexity(keras.Model):
    """Returns a log that it computes from the result of a metric."""

    def __init__(self):
        super().__init__()
        self.bias = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, x):
        return x + self.bias

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "perplexity": ops.exp(logs["loss"])}


def errors(seed=1):
    generator = np.random.default_rng(seed)
    x, y = (generator.normal(size=(160, 1)).astype(np.float32) for _ in range(2))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4), np.abs(x - y)


@pytest.mark.parametrize("steps_per_execution", with_matrix([1, 3], at_length=[1]))
def test_maxima_and_minima_of_metrics_are_those_of_all_examples(strategy, steps_per_execution):
    dataset, error = errors()
    with strategy.scope():
        model = Perplexity()
        model.compile(
            keras.optimizers.SGD(0.0),
            "mae",
            metrics=bounds(),
            steps_per_execution=steps_per_execution,
        )
    history = model.fit(dataset, validation_data=dataset, epochs=2, verbose=0).history
    expected = {"largest": error.max(), "smallest": error.min(), "loss": error.mean()}
    for prefix, name in itertools.product(("", "val_"), expected):
        np.testing.assert_allclose(history[prefix + name], [expected[name]] * 2, rtol=1e-5)
    np.testing.assert_allclose(history["perplexity"], [np.exp(error.mean())] * 2, rtol=1e-5)


class LastError(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="last_error")
        self.last = self.add_variable((), initializer="zeros", name="last")

    def update_state(self, y, predicted, sample_weight=None):
        self.last.assign(ops.mean(ops.abs(ops.cast(y, "float32") - predicted)))

    def result(self):
        return self.last


def test_a_metric_whose_state_is_neither_is_refused_by_name(strategy):
    dataset, error = errors()
    with strategy.scope():
        model = Perplexity()
        model.compile("sgd", "mae", metrics=[LastError()])
    with pytest.raises(UnsupportedError, match=r"state of a metric: 'last_error/last'"):
        model.evaluate(dataset, verbose=0)
    model.compile("sgd", "mae", metrics=[LastError()], run_eagerly=True)
    with pytest.warns(UserWarning, match="run eagerly"):
        logs = model.evaluate(dataset, verbose=0, return_dict=True)
    np.testing.assert_allclose(logs["last_error"], error[-4:].mean(), rtol=1e-5)


class Mixed(Perplexity):
    def train_step(self, data):
        logs = super().train_step(data)
        return {"sum": logs["loss"] + ops.sum(data[0])}


def test_a_log_that_mixes_a_metric_with_the_batch_is_refused_by_name(strategy):
    with strategy.scope():
        model = Mixed()
        model.compile("sgd", "mae", metrics=bounds())
    with pytest.raises(UnsupportedError, match=r"Received: the log 'sum'"):
        model.fit(errors()[0], verbose=0)
