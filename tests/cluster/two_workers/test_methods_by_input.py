"""Each kind of input, with each method that takes it: every example is visited once, and the
results are plain Keras's.
"""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import kerasps
from support.matrix import with_matrix
from support.models import Batches, Examples, ids_data

NUM_EXAMPLES, BATCH_SIZE = 203, 10
X, Y = ids_data(NUM_EXAMPLES)


class Dense(keras.Model):
    """A dense layer on whatever it is given: one tensor or several, dense, ragged or sparse."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.out = keras.layers.Dense(1)

    def call(self, inputs):
        leaves = (
            [inputs]
            if isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor))
            else keras.tree.flatten(inputs)
        )
        return self.out(
            self.hidden(keras.ops.concatenate([as_dense(leaf) for leaf in leaves], axis=1))
        )


def as_dense(leaf):
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.to_tensor(shape=[None, 2])
    return tf.sparse.to_dense(leaf) if isinstance(leaf, tf.SparseTensor) else leaf


def make_model():
    model = Dense()
    # A batch normalisation or dropout would tell apart which examples came together; the sum of
    # losses does not.
    model.compile("sgd", "mse", metrics=[Batches(), Examples()], steps_per_execution=3)
    return model


def batches(x=X):
    for start in range(0, NUM_EXAMPLES, BATCH_SIZE):
        part = slice(start, start + BATCH_SIZE)
        yield x[part], Y[part]


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return -(-NUM_EXAMPLES // BATCH_SIZE)

    def __getitem__(self, index):
        part = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        return X[part], Y[part]


def dataset(x=X):
    return tf.data.Dataset.from_tensor_slices((x, Y)).batch(BATCH_SIZE)


def sharded(context):
    return dataset().shard(context.num_input_pipelines, context.input_pipeline_id)


def generated():
    spec = tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None, 1], tf.float32)
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def sparse():
    return tf.sparse.from_dense(X)


def ragged():
    return tf.RaggedTensor.from_tensor(X, ragged_rank=1)


# Arrays are given as x and y, all else as x.
ARRAYS = {
    "numpy": lambda: X,
    "tensor": lambda: tf.constant(X),
    "dict": lambda: {"left": X[:, :1], "right": X[:, 1:]},
    "list": lambda: [X[:, :1], X[:, 1:]],
    "pandas": lambda: pd.DataFrame(X, columns=["left", "right"]),
    "ragged": ragged,
    "sparse": sparse,
}
FED = {"PyDataset": Sequence, "generator": batches, "dataset of a Python generator": generated}
OTHERS = {
    "dataset": dataset,
    "dataset of unknown length": lambda: dataset().filter(lambda *_: True),
    "dataset of ragged tensors": lambda: dataset(ragged()),
    "dataset of sparse tensors": lambda: dataset(sparse()),
    "DatasetCreator": lambda: kerasps.DatasetCreator(sharded),
    **FED,
}
INPUTS = [*ARRAYS, *OTHERS]


def arguments(name, with_targets=True):
    if name in OTHERS:
        return {"x": OTHERS[name]()}
    targets = {"y": pd.DataFrame(Y) if name == "pandas" else Y} if with_targets else {}
    return {"x": ARRAYS[name](), "batch_size": BATCH_SIZE, **targets}


@pytest.fixture
def pair(strategy):
    """A model on the cluster and a plain one with the same weights."""
    keras.utils.set_random_seed(1)
    plain = make_model()
    plain(X)
    with strategy.scope():
        ours = make_model()
        ours(X)
    ours.set_weights(plain.get_weights())
    return plain, ours


def warns_where_fed(name):
    fed = pytest.warns(UserWarning, match="lives in this process|calls Python functions")
    return fed if name in FED else contextlib.nullcontext()


@pytest.mark.parametrize("name", with_matrix(INPUTS, at_length=INPUTS[1::4]))
def test_fit(pair, name):
    _, ours = pair
    with warns_where_fed(name):
        history = ours.fit(**arguments(name), verbose=0)
    assert history.history["examples"] == [NUM_EXAMPLES]
    assert history.history["ids"] == [sum(range(NUM_EXAMPLES))]
    assert int(ours.optimizer.iterations.numpy()) == history.history["batches"][0]


# Each input goes to `fit`, and to one of these two.
@pytest.mark.parametrize("name", with_matrix(INPUTS, at_length=INPUTS[1::2]))
def test_evaluate(pair, name):
    plain, ours = pair
    expected = plain.evaluate(X, Y, batch_size=BATCH_SIZE, verbose=0, return_dict=True)
    with warns_where_fed(name):
        actual = ours.evaluate(**arguments(name), verbose=0, return_dict=True)
    assert actual.pop("batches") >= expected.pop(
        "batches"
    )  # of a `DatasetCreator`, each worker has a last one
    assert actual == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", with_matrix(INPUTS, at_length=INPUTS[::2]))
def test_predict(pair, name):
    plain, ours = pair
    with warns_where_fed(name):
        actual = ours.predict(**arguments(name, with_targets=False), verbose=0)
    np.testing.assert_allclose(actual, plain.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    with_matrix(
        ["numpy", "dataset", "generator", "DatasetCreator"], at_length=["numpy", "generator"]
    ),
)
def test_steps(pair, name):
    plain, ours = pair
    with warns_where_fed(name):
        actual = ours.predict(**arguments(name, with_targets=False), steps=7, verbose=0)
    np.testing.assert_allclose(actual, plain.predict(X[:70], verbose=0), rtol=1e-5, atol=1e-6)
    with warns_where_fed(name):
        logs = ours.evaluate(**arguments(name), steps=7, verbose=0, return_dict=True)
    assert (logs["batches"], logs["examples"]) == (7, 70)
    if name != "DatasetCreator":  # its batches have no order
        assert logs["ids"] == sum(range(70))
