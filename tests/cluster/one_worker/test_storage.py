"""Variables that an execution finds by name."""

from __future__ import annotations

import contextlib
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

import kerasps


def is_there(shared_name, device):
    with tf.device(device):
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.float32, shape=[3], container="", shared_name=shared_name
        )
        return bool(tf.raw_ops.VarIsInitializedOp(resource=handle).numpy())


@pytest.mark.parametrize(
    "place",
    [contextlib.nullcontext, lambda: tf.Graph().as_default(), lambda: FuncGraph("f").as_default()],
)
def test_a_variable_leaves_its_ps_when_it_is_collected(strategy, place):
    with strategy.scope():
        variable = keras.Variable(np.arange(3.0, dtype="float32"))
    name, device = variable.storage.shared_name, variable.device
    assert "/job:ps" in device
    assert is_there(name, device)
    # Python may collect it in the middle of anything, such as TensorFlow building a graph.
    with place():
        del variable
        gc.collect()
    assert not is_there(name, device)


def test_variables_of_one_name_do_not_meet(strategy):
    with strategy.scope():
        ones, zeros = (
            keras.Variable(np.full(3, value, "float32"), name="same") for value in (1, 0)
        )
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
    executions = list(model.train_function._step_graphs.values())
    assert executions
    # The handles of the ticket, the totals and the iterator, which are on the worker.
    for execution in executions:
        assert {argument.dtype for argument in execution.inputs} == {tf.resource}
        assert len(execution.inputs) <= 4
        assert not execution.outputs


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
    second.fit(
        kerasps.DatasetCreator(lambda _: tf.data.Dataset.from_tensors((x, y)).repeat()),
        steps_per_epoch=3,
        verbose=0,
    )
    assert not np.array_equal(second.get_weights()[0], before)
    assert int(second.optimizer.iterations.numpy()) == 5


def trained(strategy, activation="relu"):
    """A model, what it learned, and the execution that taught it."""
    gc.collect()  # what other tests have left would give back its names in between
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(5, activation=activation), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse", steps_per_execution=3)
    x = np.random.default_rng(0).normal(size=(36, 4)).astype("float32")
    model.fit(x, x.sum(1, keepdims=True), batch_size=4, shuffle=False, verbose=0)
    (execution,) = model.train_function._step_graphs.values()
    return model, model.get_weights(), execution


def test_a_model_like_one_that_is_gone_trains_with_its_execution(strategy):
    model, learned, execution = trained(strategy)
    names = {variable.storage.shared_name for variable in model.trainable_variables}
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None  # though its execution is kept
    model, learned_next, execution_next = trained(strategy)
    assert execution_next is execution
    assert {variable.storage.shared_name for variable in model.trainable_variables} == names
    for weights, expected in zip(learned_next, learned, strict=True):
        np.testing.assert_array_equal(weights, expected)


def test_models_that_differ_or_live_at_once_have_executions_of_their_own(strategy):
    first, learned, execution = trained(strategy)
    second, learned_second, execution_second = trained(strategy)
    assert execution_second is not execution
    for weights, second_weights, expected in zip(
        first.get_weights(), learned_second, learned, strict=True
    ):
        np.testing.assert_array_equal(weights, expected)
        np.testing.assert_array_equal(second_weights, expected)
    del first, second
    gc.collect()
    _, _, execution_third = trained(strategy, activation="tanh")
    assert execution_third not in (execution, execution_second)


def test_names_of_variables_are_new_after_steps_were_given_up(strategy):
    model, _, execution = trained(strategy)
    names = {variable.storage.shared_name for variable in model.variables}

    def fail(batch, logs):
        raise InterruptedError

    x = np.ones((36, 4), "float32")
    with pytest.raises(InterruptedError):
        model.fit(
            x,
            x[:, :1],
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=fail)],
            verbose=0,
        )
    del model
    gc.collect()
    model, _, execution_next = trained(strategy)
    assert names.isdisjoint(variable.storage.shared_name for variable in model.variables)
    assert execution_next is not execution
