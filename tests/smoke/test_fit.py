"""Every method and kind of input once, on a cluster inside this process: counts are exact."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.models import counting_model, endless, ids_data

NUM_EXAMPLES = 100
# Of the ids 0 to 99, each once.
IDS = {"examples": 100.0, "ids": 4950.0, "squares": 328350.0}


def batched(num_examples=NUM_EXAMPLES):
    return tf.data.Dataset.from_tensor_slices(ids_data(num_examples)).batch(8)


def plain_scope():
    """Return what stands in for a strategy where a model is made by plain Keras."""
    return tf.distribute.get_strategy()


def counts(logs, epoch=None):
    """Return what the metrics counted."""
    return {name: logs[name] if epoch is None else logs[name][epoch] for name in IDS}


@pytest.mark.parametrize("steps_per_execution", [1, 10])
def test_fit_of_a_dataset_creator_does_so_many_steps(strategy, steps_per_execution):
    model = counting_model(strategy, steps_per_execution)
    before = model.get_weights()
    history = model.fit(kerasps.DatasetCreator(endless), steps_per_epoch=25, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 50
    assert history.history["batches"] == [25.0, 25.0]
    assert history.history["examples"] == [200.0, 200.0]
    assert not all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.parametrize("steps_per_execution", [1, 10])
def test_fit_of_arrays_reads_each_example_once(strategy, steps_per_execution):
    model = counting_model(strategy, steps_per_execution)
    x, y = ids_data(NUM_EXAMPLES)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
    assert [counts(history, epoch) for epoch in (0, 1)] == [IDS, IDS]
    assert history["batches"] == [13.0, 13.0]


def test_fit_of_a_dataset_of_unknown_length_reads_each_example_once(strategy):
    model = counting_model(strategy, steps_per_execution=3)
    unknown = batched().filter(lambda x, y: tf.reduce_all(y >= 0.0))
    assert unknown.cardinality() == tf.data.UNKNOWN_CARDINALITY
    history = model.fit(unknown, epochs=2, verbose=0).history
    assert [counts(history, epoch) for epoch in (0, 1)] == [IDS, IDS]


@pytest.mark.filterwarnings("ignore:x, of type Sequence, lives in this process")
def test_fit_of_a_py_dataset_reads_each_example_once(strategy):
    class Sequence(keras.utils.PyDataset):
        def __len__(self):
            return 13

        def __getitem__(self, index):
            x, y = ids_data(NUM_EXAMPLES)
            return x[index * 8 :][:8], y[index * 8 :][:8]

    model = counting_model(strategy, steps_per_execution=4)
    assert counts(model.fit(Sequence(), verbose=0).history, 0) == IDS


def test_validation_data_are_counted_by_themselves(strategy):
    model = counting_model(strategy)
    history = model.fit(batched(48), validation_data=batched(), epochs=2, verbose=0).history
    assert [{name: history[f"val_{name}"][epoch] for name in IDS} for epoch in (0, 1)] == [IDS, IDS]
    assert history["examples"] == [48.0, 48.0]


def test_class_weights_weigh_the_loss(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy")
        model.set_weights([np.array([[1.0]]), np.array([0.0])])
    x = np.array([[0.0], [0.0], [2.0], [2.0]] * 8, "float32")
    y = np.array([[0], [1], [0], [1]] * 8)
    loss = model.fit(x, y, batch_size=4, class_weight={0: 1.0, 1: 3.0}, verbose=0).history["loss"]
    p = 1 / (1 + np.exp(-np.array([0.0, 2.0])))
    expected = -(np.log(1 - p).sum() + 3.0 * np.log(p).sum()) / 4
    np.testing.assert_allclose(loss, [expected], rtol=1e-5)


def test_evaluate_and_predict_equal_plain_keras(strategy):
    ours, plain = counting_model(strategy, steps_per_execution=3), counting_model(plain_scope())
    plain.set_weights(ours.get_weights())
    x, y = ids_data(NUM_EXAMPLES)
    logs = ours.evaluate(x, y, batch_size=8, return_dict=True, verbose=0)
    expected = plain.evaluate(x, y, batch_size=8, return_dict=True, verbose=0)
    assert logs == pytest.approx(expected, rel=1e-5)
    assert counts(logs) == IDS
    np.testing.assert_allclose(
        ours.predict(x, batch_size=8, verbose=0), plain.predict(x, verbose=0), rtol=1e-5, atol=1e-6
    )


def as_floats(logs):
    return {name: float(value) for name, value in logs.items()}


def test_methods_on_a_batch_equal_plain_keras(strategy):
    ours, plain = counting_model(strategy), counting_model(plain_scope())
    plain.set_weights(ours.get_weights())
    before = ours.get_weights()
    x, y = ids_data(8)
    for _ in range(3):
        # Keras 3.12 adds them up from call to call, and returns arrays.
        plain.reset_metrics()
        logs = ours.train_on_batch(x, y, return_dict=True)
        expected = plain.train_on_batch(x, y, return_dict=True)
        assert as_floats(logs) == pytest.approx(as_floats(expected), rel=1e-5)
    for old, new, expected in zip(before, ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(new, expected, rtol=1e-5, atol=1e-6)
        assert not np.array_equal(new, old)
    plain.reset_metrics()
    np.testing.assert_allclose(ours.test_on_batch(x, y), plain.test_on_batch(x, y), rtol=1e-5)
    np.testing.assert_allclose(ours.predict_on_batch(x), plain.predict_on_batch(x), rtol=1e-5)


def test_a_callback_reads_the_weights_and_stops_the_training(strategy):
    class Reader(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.kernels = []

        def on_epoch_end(self, epoch, logs=None):
            self.kernels.append(self.model.layers[0].kernel.numpy())
            self.model.stop_training = epoch == 2

    model, reader = counting_model(strategy), Reader()
    history = model.fit(batched(), epochs=10, verbose=0, callbacks=[reader])
    assert history.epoch == [0, 1, 2]
    assert len(reader.kernels) == 3
    assert not np.array_equal(reader.kernels[0], reader.kernels[1])
    np.testing.assert_array_equal(reader.kernels[-1], model.layers[0].kernel.numpy())


def test_data_that_fail_are_an_error_that_says_what_they_said_and_fit_works_after_it(strategy):
    def checked(x, y):
        with tf.control_dependencies([tf.debugging.assert_less(y, 50.0, "no such example")]):
            return x, tf.identity(y)

    model = counting_model(strategy)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no such example"):
        model.fit(batched().map(checked), verbose=0)
    assert counts(model.fit(batched(), verbose=0).history, 0) == IDS
