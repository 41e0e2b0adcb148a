"""Variables that an execution finds by name."""

from __future__ import annotations

import gc

import keras
import numpy as np
import tensorflow as tf

import kerasps


def is_there(shared_name, device):
    with tf.device(device):
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[3], container="", shared_name=shared_name)
        return bool(tf.raw_ops.VarIsInitializedOp(resource=handle).numpy())


def test_a_variable_leaves_its_ps_when_it_is_collected(strategy):
    with strategy.scope():
        variable = keras.Variable(np.arange(3.0, dtype="float32"))
    name, device = variable.storage.shared_name, variable.device
    assert "/job:ps" in device
    assert is_there(name, device)
    del variable
    gc.collect()
    assert not is_there(name, device)


def test_variables_of_one_name_do_not_meet(strategy):
    with strategy.scope():
        ones, zeros = (keras.Variable(np.full(3, value, "float32"), name="same") for value in (1, 0))
    ones.assign_add(np.ones(3, "float32"))
    np.testing.assert_array_equal(ones.numpy(), [2, 2, 2])
    np.testing.assert_array_equal(zeros.numpy(), [0, 0, 0])


def test_an_execution_is_sent_nothing_but_its_data_however_many_variables_there_are(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(5))])
        model.compile("adam", "mse")
    x = np.ones((8, 4), "float32")
    model.fit(x, x, batch_size=4, verbose=0)
    assert len(model.optimizer.variables) > 20
    executions = list(model.train_function._executions.values())
    assert executions
    assert all(len(execution.inputs) == 1 and not execution.outputs for execution in executions)


def test_a_model_trains_on_when_another_has_gone(strategy):
    def make():
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        return model

    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    first, second = make(), make()
    for model in (first, second):
        model.fit(x, y, batch_size=4, verbose=0)
    del first, model
    gc.collect()
    before = second.get_weights()[0]
    second.fit(kerasps.DatasetCreator(lambda _: tf.data.Dataset.from_tensors((x, y)).repeat()), steps_per_epoch=3, verbose=0)
    assert not np.array_equal(second.get_weights()[0], before)
    assert int(second.optimizer.iterations.numpy()) == 5
