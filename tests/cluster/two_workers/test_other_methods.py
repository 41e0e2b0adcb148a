"""`evaluate`, `predict`, `*_on_batch`, saving and loading give what plain Keras gives."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.models import endless, ids_data
from support.versions import KERAS


def make_model():
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(4, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=1),
            keras.layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        "mse",
        metrics=["mae", keras.metrics.RootMeanSquaredError(name="rmse")],
    )
    return model


@pytest.fixture
def pair(strategy):
    """A model trained on the cluster and a plain one with its weights."""
    with strategy.scope():
        ours = make_model()
    ours.fit(kerasps.DatasetCreator(endless), steps_per_epoch=12, verbose=0)
    plain = make_model()
    plain.set_weights(ours.get_weights())
    return plain, ours


def test_evaluate_equals_plain_keras(pair, strategy):
    plain, ours = pair
    x, y = ids_data(37)
    weight = np.linspace(0, 1, 37).astype("float32")
    expected = plain.evaluate(x, y, batch_size=8, sample_weight=weight, return_dict=True, verbose=0)
    assert ours.evaluate(
        x, y, batch_size=8, sample_weight=weight, return_dict=True, verbose=0
    ) == pytest.approx(expected)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    expected = plain.evaluate(dataset, verbose=0)
    assert ours.evaluate(dataset, verbose=0) == pytest.approx(expected)
    assert ours.evaluate(
        kerasps.DatasetCreator(lambda context: dataset), verbose=0
    ) == pytest.approx(expected)
    with strategy.scope():
        assert ours.evaluate(dataset, verbose=0) == pytest.approx(expected)


def test_evaluate_sees_weights_that_changed(pair):
    plain, ours = pair
    x, y = ids_data(16)
    ours.evaluate(x, y, verbose=0)
    ours.fit(kerasps.DatasetCreator(endless), steps_per_epoch=5, verbose=0)
    plain.set_weights(ours.get_weights())
    assert ours.evaluate(x, y, verbose=0) == pytest.approx(plain.evaluate(x, y, verbose=0))


def test_predict_equals_plain_keras(pair):
    plain, ours = pair
    x, y = ids_data(37)
    np.testing.assert_allclose(
        ours.predict(x, batch_size=8, verbose=0),
        plain.predict(x, batch_size=8, verbose=0),
        rtol=1e-6,
    )
    np.testing.assert_allclose(ours.predict_on_batch(x), plain.predict_on_batch(x), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(ours(x)), np.asarray(plain(x)), rtol=1e-6)
    assert ours.test_on_batch(x, y) == pytest.approx(
        [float(value) for value in plain.test_on_batch(x, y)]
    )


def test_predict_of_batches_whose_rows_differ_in_shape_is_ragged_as_in_plain_keras(strategy):
    def model():
        return keras.Sequential(
            [keras.Input((None, 2)), keras.layers.Conv1D(3, 2, kernel_initializer="ones")]
        )

    def batches():
        for length in (5, 9, 5):
            yield (np.arange(8 * length, dtype="float32").reshape(4, length, 2),)

    with strategy.scope():
        ours = model()
    with pytest.warns(UserWarning, match="lives in this process"):
        predicted = ours.predict(batches(), verbose=0)
    # Plain Keras says so of every generator, up to 3.15.
    warned = pytest.warns(UserWarning, match="ran out of data")
    with warned if KERAS < (3, 16) else contextlib.nullcontext():
        assert predicted.to_list() == model().predict(batches(), verbose=0).to_list()


def test_train_on_batch_equals_plain_keras(pair):
    plain, ours = pair
    plain.optimizer.build(plain.trainable_variables)
    for mine, theirs in zip(plain.optimizer.variables, ours.optimizer.variables, strict=True):
        mine.assign(theirs.numpy())
    plain.layers[2].seed_generator.state.assign(ours.layers[2].seed_generator.state.numpy())
    for size in (8, 8, 5):
        x, y = ids_data(size)
        plain.reset_metrics()  # as Keras does itself since after 3.12
        expected = {
            name: float(value)
            for name, value in plain.train_on_batch(x, y, return_dict=True).items()
        }
        assert ours.train_on_batch(x, y, return_dict=True) == pytest.approx(expected, rel=1e-5)
    assert int(ours.optimizer.iterations.numpy()) == 15
    for expected, actual in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_weights_can_be_read_and_set(pair):
    _, ours = pair
    weights = [w + 1 for w in ours.get_weights()]
    ours.set_weights(weights)
    for expected, actual in zip(weights, ours.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)
    with pytest.raises(ValueError, match="shape"):
        ours.layers[0].kernel.assign(np.zeros((3, 3)))


@pytest.mark.parametrize("file", ["model.keras", "model.weights.h5"])
def test_saved_files_are_plain_keras(pair, strategy, tmp_path, file):
    _, ours = pair
    x, _ = ids_data(9)
    path = str(tmp_path / file)
    if file.endswith(".keras"):
        ours.save(path)
        loaded = keras.models.load_model(path)
        for theirs, mine in zip(loaded.optimizer.variables, ours.optimizer.variables, strict=True):
            np.testing.assert_array_equal(theirs.numpy(), mine.numpy())
        with strategy.scope():
            again = keras.models.load_model(path)
        again.fit(kerasps.DatasetCreator(endless), steps_per_epoch=3, verbose=0)
        assert int(again.optimizer.iterations.numpy()) == 15
    else:
        ours.save_weights(path)
        loaded = make_model()
        loaded.optimizer.build(loaded.trainable_variables)
        loaded.load_weights(path)
        with strategy.scope():
            again = make_model()
            again.optimizer.build(again.trainable_variables)
        again.load_weights(path)
        np.testing.assert_allclose(
            again.predict(x, verbose=0), ours.predict(x, verbose=0), rtol=1e-6
        )
    np.testing.assert_allclose(loaded.predict(x, verbose=0), ours.predict(x, verbose=0), rtol=1e-6)


def test_checkpoint_callback_writes_during_fit(strategy, tmp_path):
    with strategy.scope():
        model = make_model()
    path = str(tmp_path / "epoch-{epoch}.keras")
    model.fit(
        kerasps.DatasetCreator(endless),
        epochs=2,
        steps_per_epoch=6,
        verbose=0,
        callbacks=[
            keras.callbacks.ModelCheckpoint(path),
            keras.callbacks.CSVLogger(str(tmp_path / "log.csv")),
        ],
    )
    loaded = keras.models.load_model(tmp_path / "epoch-2.keras")
    for expected, actual in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3


def test_models_outside_the_scope_never_notice(strategy):
    model = make_model()
    assert type(model.layers[0].kernel) is keras.Variable
    model.fit(*ids_data(16), verbose=0)
    assert "/job:localhost" in model.layers[0].kernel.value.device
