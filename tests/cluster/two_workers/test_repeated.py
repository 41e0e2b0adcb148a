"""Data that repeat: every example of a pass is seen before any is seen again."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.gates import wait_while_exists
from support.matrix import with_matrix

NUM = 60


class Seen(keras.Model):
    """Counts how often it has seen each example.

    A step on example `gate_at` waits while the file `gate` is there.
    """

    def __init__(self, gate="", gate_at=-1):
        super().__init__()
        self.seen = self.add_weight(shape=(NUM,), initializer="zeros", trainable=False)
        self.dense = keras.layers.Dense(1)
        self.gate, self.gate_at = gate, gate_at

    def call(self, x):
        return self.dense(tf.cast(x, tf.float32)[:, None])

    def train_step(self, x):
        waited = wait_while_exists(self.gate, tf.reduce_any(x == self.gate_at))
        with tf.control_dependencies([waited]):
            self.seen.assign_add(tf.reduce_sum(tf.one_hot(x, NUM), 0))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x))
        weights = self.dense.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    @property
    def counts(self):
        return keras.ops.convert_to_numpy(self.seen).astype(int).tolist()


def seen_model(strategy, steps_per_execution=1, **arguments):
    with strategy.scope():
        model = Seen(**arguments)
        optimizer = keras.optimizers.SGD(0.0)
        model.compile(optimizer, steps_per_execution=steps_per_execution)
    return model


def numbers():
    return tf.data.Dataset.range(NUM)


KINDS = {
    "batch, repeat": lambda: numbers().batch(2).repeat(),
    "repeat, batch": lambda: numbers().repeat().batch(2),
    "shuffled": lambda: numbers().shuffle(NUM).batch(2).repeat().prefetch(2),
    "of unknown length": lambda: numbers().filter(lambda _: True).batch(2).repeat(),
}


@pytest.mark.parametrize(
    ("name", "steps_per_execution"),
    with_matrix(
        [*((name, 1) for name in KINDS), *((name, 8) for name in KINDS)],
        at_length=[("batch, repeat", 1), ("shuffled", 1), ("repeat, batch", 8)],
    ),
)
def test_each_example_is_seen_once_in_each_pass(strategy, name, steps_per_execution):
    model = seen_model(strategy, steps_per_execution)
    # 90 batches are three passes; no epoch ends with one but the last.
    model.fit(KINDS[name](), steps_per_epoch=18, epochs=5, verbose=0)
    assert model.counts == [3] * NUM
    # Another `fit` begins anew, so half a pass more does not matter to it.
    model.fit(KINDS[name](), steps_per_epoch=15, epochs=1, verbose=0)
    before = np.array(model.counts)
    model.fit(KINDS[name](), steps_per_epoch=30, epochs=2, verbose=0)
    assert (model.counts - before).tolist() == [2] * NUM
    assert int(model.optimizer.iterations.numpy()) == 90 + 15 + 60


def test_a_worker_that_is_behind_is_waited_for(strategy, tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    model = seen_model(strategy, gate=str(gate), gate_at=1)

    def open_gate(batch, logs=None):
        # So many batches the other workers have of the first pass, without any of the one that
        # waits at its first.
        if batch >= NUM // 2 - 1:
            gate.unlink(missing_ok=True)

    opens = keras.callbacks.LambdaCallback(on_train_batch_end=open_gate)
    data = numbers().batch(1).repeat()
    model.fit(data, steps_per_epoch=90, epochs=2, verbose=0, callbacks=[opens])
    assert not gate.exists()
    assert model.counts == [3] * NUM


def test_a_backup_within_a_pass_is_resumed_there(strategy, tmp_path):
    def backup():
        return kerasps.BackupAndRestore(tmp_path / "backup", interval_s=1e-3)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations >= 45:
                raise KeyboardInterrupt

    data = numbers().shuffle(NUM).batch(2).repeat()
    with pytest.raises(KeyboardInterrupt):
        seen_model(strategy).fit(
            data, steps_per_epoch=50, epochs=3, verbose=0, callbacks=[backup(), Stop()]
        )
    model = seen_model(strategy)
    model.fit(data, steps_per_epoch=50, epochs=3, verbose=0, callbacks=[backup()])
    assert int(model.optimizer.iterations.numpy()) == 150
    assert model.counts == [5] * NUM


def test_a_stop_within_a_pass_ends_the_epoch(strategy):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch >= 40:
                self.model.stop_training = True

    model = seen_model(strategy)
    history = model.fit(
        KINDS["of unknown length"](), steps_per_epoch=90, epochs=3, verbose=0, callbacks=[Stop()]
    )
    assert history.epoch == [0]
    assert int(model.optimizer.iterations.numpy()) < 90
