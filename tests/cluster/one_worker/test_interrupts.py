"""After an interrupt, nothing waits for an execution that does not end."""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.training.sessions import session_flights

NUM_STEPS = 4


class Interrupt(keras.callbacks.Callback):
    """Raises what an interrupt raises, when the worker's next batch does not come."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == NUM_STEPS - 1:
            raise KeyboardInterrupt


@pytest.fixture
def blocked(tmp_path):
    """Returns data that block the worker after some batches, until the test ends."""
    path = tmp_path / "blocked"
    os.mkfifo(path)
    x = np.ones([NUM_STEPS * 2, 1], "float32")
    never = tf.data.TextLineDataset(str(path)).map(lambda line: (tf.zeros([1]), tf.zeros([1])))
    yield tf.data.Dataset.from_tensor_slices((x, x)).concatenate(never).batch(2)
    # Lets the worker's read go on; without a reader, there is none that waits.
    with open(os.open(path, os.O_RDWR | os.O_NONBLOCK), "w") as writer:
        writer.write("\n" * 10)


def test_variables_are_read_after_an_interrupt_while_data_block(strategy, blocked, monkeypatch):
    monkeypatch.setattr(session_flights, "_ABANDON_S", 1.0)
    monkeypatch.setenv("KERASPS_WORKER_TIMEOUT", "600")
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(KeyboardInterrupt):
        model.fit(blocked, verbose=0, callbacks=[Interrupt()])
    before = model.get_weights()
    assert int(model.optimizer.iterations.numpy()) == NUM_STEPS
    x = np.ones([8, 1], "float32")
    model.fit(x, x, batch_size=2, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == NUM_STEPS + 8
    assert not np.array_equal(model.get_weights()[0], before[0])
