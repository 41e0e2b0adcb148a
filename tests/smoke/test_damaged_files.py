"""Files that were cut short or are something else, loaded with a cluster inside this process."""

from __future__ import annotations

import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf


@pytest.fixture(scope="module")
def model(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64)])
        model.compile("adam", "mse")
    return model


def halved(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def overwritten(path):
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64 * [255])
    path.write_bytes(data)


def emptied(path):
    path.write_bytes(b"")


CASES = [
    ("m.keras", halved, ValueError, "no zip archive"),
    ("m.keras", emptied, ValueError, "no zip archive, in a file of 0 bytes"),
    ("m.keras", overwritten, zipfile.BadZipFile, "'model.weights.h5' with a wrong checksum"),
    ("m.weights.h5", halved, OSError, "truncated file"),
    ("m.weights.h5", emptied, OSError, "in a file of 0 bytes"),
]


@pytest.mark.parametrize(
    ("name", "damage", "error", "received"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_file_that_is_damaged_is_named(strategy, model, tmp_path, name, damage, error, received):
    path = tmp_path / name
    if name.endswith(".keras"):
        model.save(path)
        loads = [keras.models.load_model, keras.saving.load_model]
    else:
        model.save_weights(path)
        loads = [model.load_weights]
    weights = model.get_weights()
    damage(path)
    for load in loads:
        for given in (path, str(path)):
            with (
                strategy.scope(),
                pytest.raises(
                    error, match=rf"The file .*{name} is damaged\. Expected: .*Received: "
                ),
            ):
                load(given)
    with strategy.scope(), pytest.raises(error) as caught:
        loads[0](path)
    assert received in str(caught.value)
    assert "copy or save it again" in str(caught.value)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_file_that_is_not_there_is_no_damaged_one(strategy, model, tmp_path):
    with strategy.scope(), pytest.raises(ValueError, match="File not found"):
        keras.models.load_model(tmp_path / "m.keras")
    with pytest.raises(FileNotFoundError):
        model.load_weights(tmp_path / "m.weights.h5")


def test_weights_of_another_model_are_no_damaged_ones(strategy, model, tmp_path):
    model.save_weights(tmp_path / "m.weights.h5")
    with strategy.scope():
        other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="could not be loaded"):
        other.load_weights(tmp_path / "m.weights.h5")


@pytest.mark.parametrize(
    ("damage", "error"),
    [(halved, tf.errors.OutOfRangeError), (overwritten, tf.errors.DataLossError)],
)
def test_a_checkpoint_that_is_damaged_is_named(model, tmp_path, damage, error):
    checkpoint = tf.train.Checkpoint(model)
    prefix = checkpoint.write(str(tmp_path / "ckpt"))
    # The kernel's; a smaller file has the graph of objects, which TensorFlow reads first.
    damage(max(tmp_path.glob("ckpt.data-*"), key=lambda path: path.stat().st_size))
    with pytest.raises(error, match=rf"The checkpoint {prefix} is damaged.*Received: "):
        checkpoint.restore(prefix)
