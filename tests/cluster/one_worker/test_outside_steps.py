"""Models of the strategy in code of the user's own, outside `fit`: gradients, functions, functions
that XLA compiles.
"""

from __future__ import annotations

import os
import select
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps

X = np.random.default_rng(0).normal(size=(4, 8, 8, 4)).astype("float32")


def grouped_convolution():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((8, 8, 4)),
            keras.layers.Conv2D(8, 3, groups=2),  # which Keras compiles by XLA
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


@pytest.fixture
def pair(strategy, sharded):
    sharded(2, min_bytes=256)
    with strategy.scope():
        ours = grouped_convolution()
    assert [len(v.shards) for v in ours.variables] == [2, 1, 2, 1]
    return grouped_convolution(), ours


def gradients(model, call):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(call(X) ** 2)
    return tape.gradient(loss, model.trainable_variables)


def assert_all_close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-4)


def test_a_compiled_function_takes_values_from_ps_as_they_are_when_it_is_called(pair):
    plain, ours = pair
    compiled = tf.function(lambda x: ours(x), jit_compile=True)
    for call in (ours, compiled):
        np.testing.assert_allclose(call(X), plain(X), rtol=1e-4)
        assert_all_close(gradients(ours, call), gradients(plain, plain))
    for model in pair:
        model.layers[0].kernel.assign(model.layers[0].kernel * 2)
    np.testing.assert_allclose(compiled(X), plain(X), rtol=1e-4)


def test_a_compiled_function_sees_what_the_function_around_it_assigns(pair):
    def around(model, call):
        @tf.function
        def function():
            with tf.GradientTape() as tape:
                before = call(X)
            model.layers[0].kernel.assign(model.layers[0].kernel * 2)
            return [before, call(X), *tape.gradient(before, model.trainable_variables)]

        return function()

    plain, ours = pair
    assert_all_close(
        around(ours, tf.function(lambda x: ours(x), jit_compile=True)), around(plain, plain)
    )


def test_gradients_loops_and_branches_within_a_compiled_function(pair):
    plain, ours = pair
    inner = tf.function(lambda x: ours(x))

    @tf.function(jit_compile=True)
    def compiled(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(ours(x) ** 2)
        twice = tf.while_loop(
            lambda i, total: i < 2,
            lambda i, total: (i + 1, total + inner(x)),
            (0, tf.zeros((4, 3))),
        )[1]
        either = tf.cond(tf.reduce_sum(x) > 1e9, lambda: x[:, 0, 0, :3], lambda: ours(x))
        return [twice + either, *tape.gradient(loss, ours.trainable_variables)]

    assert_all_close(compiled(X), [3 * plain(X), *gradients(plain, plain)])


def test_a_compiled_function_that_assigns_is_refused_by_name(pair):
    kernel = pair[1].layers[0].kernel

    @tf.function(jit_compile=True)
    def assigns():
        kernel.assign_add(kernel)

    with pytest.raises(Exception, match=f"compiled by XLA assigns to '{kernel.path}'"):
        assigns()


def test_a_tape_takes_gradients_of_a_variable_in_shards(strategy, sharded):
    sharded(3, min_bytes=256)
    plain = keras.layers.Embedding(20, 8)
    plain.build()
    with strategy.scope():
        ours = keras.layers.Embedding(20, 8)
        ours.build()
    ours.set_weights(plain.get_weights())
    assert len(ours.embeddings.shards) == 3
    ids = tf.constant([[1, 2, 3], [3, 19, 0]])
    found = []
    for layer in (plain, ours):
        table = layer.embeddings
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(table.value)
            rows = tf.reduce_sum(layer(ids) ** 3)
            whole = rows + tf.reduce_sum(table * 2.0)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as first:
                cubes = tf.reduce_sum(table**3)
            squares = tf.reduce_sum(first.gradient(cubes, table) ** 2)
        with tf.GradientTape() as jacobian_tape:
            looked_up = layer(ids)
        sparse = tape.gradient(rows, table)
        assert isinstance(sparse, tf.IndexedSlices)
        found.append(
            [
                sparse,
                tape.gradient(whole, {"table": table})["table"],
                outer.gradient(squares, [table])[0],
                jacobian_tape.jacobian(looked_up, table),
            ]
        )
        assert tape.gradient(tf.constant(1.0), table) is None
    assert_all_close(map(tf.convert_to_tensor, found[1]), map(tf.convert_to_tensor, found[0]))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python's own, from 3.12 on
@pytest.mark.parametrize("use", ["read", "assign", "make", "train"])
def test_a_forked_process_is_told_that_it_cannot_reach_the_cluster(strategy, use):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    uses = {
        "read": lambda: model.layers[0].kernel.numpy(),
        "assign": lambda: model.layers[0].bias.assign_add([1.0]),
        "make": lambda: keras.layers.Dense(1).build((None, 2)),
        "train": lambda: model.fit(np.zeros((4, 2)), np.zeros((4, 1)), verbose=0),
    }
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with strategy.scope():
                uses[use]()
        except kerasps.KeraspsError as error:
            os.write(tell, str(error).encode())
        finally:
            os._exit(0)
    os.close(tell)
    has_ended = select.select([told], [], [], 60)[0]
    message = os.read(told, 4096).decode() if has_ended else ""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(told)
    assert "forked from one that is connected" in message
    assert model.layers[0].bias.numpy() == 0.0  # here, it can be reached
