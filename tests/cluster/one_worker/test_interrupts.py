"""After an interrupt, nothing waits for data that do not come, and iterators are deleted."""

from __future__ import annotations

import gc
import os
import time

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from kerasps.training.sessions import session_flights

NUM_STEPS = 4
# More than the threads in which a worker of a small machine does what it is told.
NUM_INTERRUPTS = 5


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
    for _ in range(NUM_INTERRUPTS):
        with pytest.raises(KeyboardInterrupt):
            model.fit(blocked, verbose=0, callbacks=[Interrupt()])
        gc.collect()  # deletes the iterator, which waits for its read
    before = model.get_weights()
    assert int(model.optimizer.iterations.numpy()) == NUM_STEPS * NUM_INTERRUPTS
    x = np.ones([8, 1], "float32")
    model.fit(x, x, batch_size=2, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == NUM_STEPS * NUM_INTERRUPTS + 8
    assert not np.array_equal(model.get_weights()[0], before[0])


def test_an_iterator_that_nothing_reads_any_more_is_deleted(strategy, tmp_path):
    path = tmp_path / "lines"
    path.write_text("1\n" * 1_000_000)  # more than is read ahead
    data = tf.data.TextLineDataset(str(path)).map(lambda line: (tf.zeros([1]), tf.zeros([1])))
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(data.batch(2).repeat(), steps_per_epoch=2, verbose=0)
    deadline = time.monotonic() + 60
    while readers(path) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert readers(path) == []


def readers(path):
    """Returns the processes of the cluster that have a file open."""
    tasks = psutil.Process().children(recursive=True)
    return [task.pid for task in tasks if str(path) in {file.path for file in task.open_files()}]
