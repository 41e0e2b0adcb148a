"""Small rules of Keras that kerasps has written again: they give what Keras's own give."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.random import _cast_seed
from keras.src.backend.tensorflow.trainer import (
    convert_to_np_if_not_ragged,
    potentially_ragged_concat,
)
from keras.src.initializers.random_initializers import compute_fans
from keras.src.random.seed_generator import draw_seed
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn
from keras.src.utils.python_utils import pythonify_logs

from kerasps.inputs.class_weights import sample_weights, weighing
from kerasps.training.loop.outputs import concatenated
from kerasps.training.methods.keras_rules import check_compiled, is_validated, plain_logs
from kerasps.variables.keras.keras_random import drawn_seed, fans

WEIGHTS = {0: 0.5, 2: 3.0}
CLASSES = [0, 1, 2, 2, 1]
TARGETS = {
    "classes": np.array(CLASSES),
    "floats": np.array(CLASSES, "float32"),
    "a column": np.array(CLASSES)[:, None],
    "a column of floats": np.array(CLASSES, "float32")[:, None],
    "one-hot": np.eye(3)[CLASSES],
    "a tensor": tf.constant(CLASSES),
}


@pytest.mark.parametrize("y", TARGETS.values(), ids=TARGETS)
def test_sample_weights_of_arrays(y):
    ours, theirs = sample_weights(y, WEIGHTS), class_weight_to_sample_weights(y, WEIGHTS)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, [0.5, 1, 3, 3, 1])


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("y", TARGETS.values(), ids=TARGETS)
def test_sample_weights_of_datasets(y, static):
    def batches():
        dataset = tf.data.Dataset.from_tensor_slices((np.arange(5), y)).batch(3)
        if static:
            return dataset
        # Batches whose last axis shows only when they come.
        rank = dataset.element_spec[1].shape.rank
        return dataset.map(
            lambda x, y: (
                x,
                tf.ensure_shape(tf.py_function(lambda t: t, [y], y.dtype), [None] * rank),
            )
        )

    ours, theirs = (
        batches().map(weighing(WEIGHTS)),
        batches().map(make_class_weight_map_fn(WEIGHTS)),
    )
    assert ours.element_spec == theirs.element_spec
    for one, other in zip(ours, theirs, strict=True):
        for mine, its in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize(
    ("element", "received"),
    [(((1, 2, 3),), "a third entry"), (((1, (2, 3)),), "y of type tuple")],
)
def test_class_weight_beside_what_it_does_not_go_with_is_refused(element, received):
    weigh = weighing(WEIGHTS)
    with pytest.raises(ValueError, match=rf"`class_weight`.*Expected: .*Received: {received}"):
        weigh(*map(tf.nest.map_structure, [tf.constant] * len(element[0]), element[0]))


@pytest.mark.parametrize(
    "logs",
    [
        None,
        {},
        {"loss": tf.constant(0.5), "accuracy": np.float32(0.25), "a": 1},
        {"b": {"c": tf.constant(1), "a": "text"}, "a": None, "matrix": np.eye(2)},
        {"tensor": tf.ones([2, 2])},
    ],
)
def test_logs(logs):
    ours, theirs = plain_logs(logs), pythonify_logs(logs)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert type(ours[name]) is type(value)
        np.testing.assert_array_equal(ours[name], value)


def test_which_epochs_are_validated():
    model = keras.Sequential()
    for frequency in (1, 2, 3, [1, 4]):
        for epoch in range(6):
            assert is_validated(epoch, frequency) == model._should_eval(epoch, frequency)
    with pytest.raises(ValueError, match=r"`validation_freq`.*Expected: .*Received: .*'often'"):
        is_validated(0, "often")


def test_a_model_that_is_not_compiled_is_refused_in_keras_words():
    model = keras.Sequential()
    with pytest.raises(ValueError, match="compile") as ours:
        check_compiled(model)
    with pytest.raises(ValueError, match="compile") as theirs:
        model._assert_compile_called("fit")
    assert str(ours.value) == str(theirs.value)
    model.compile(loss="mse")
    check_compiled(model)


def as_list(value):
    return value.to_list() if isinstance(value, tf.RaggedTensor) else np.asarray(value).tolist()


def random_values(*shape):
    return np.asarray(np.random.default_rng(0).normal(size=shape), "float32")


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 3)],
        [(2, 3), (1, 3)],
        [()],
        [(), ()],
        [(2,), (3,)],
        [(2, 3), (2, 5)],
        [(2, 3, 4), (1, 5, 4)],
        [(2, 3, 4), (1, 3, 5)],
        [(2, 3, 4, 2), (2, 6, 4, 2), (1, 1, 4, 2)],
        [(1, 2, 3), (1, 4, 5)],
    ],
)
def test_predictions_are_joined(shapes):
    arrays = [random_values(*shape) for shape in shapes]
    # Writing to what is returned changes nothing else.
    for array in arrays:
        array.flags.writeable = False
    ours = concatenated(arrays)
    theirs = convert_to_np_if_not_ragged(
        potentially_ragged_concat([tf.constant(array) for array in arrays])
    )
    assert type(ours) is type(theirs)
    assert tuple(ours.shape) == tuple(theirs.shape)
    assert as_list(ours) == as_list(theirs)
    if isinstance(theirs, np.ndarray):
        assert ours.flags.writeable
        assert theirs.flags.writeable
        assert not any(np.shares_memory(ours, array) for array in arrays)


@pytest.mark.parametrize("values", [[b"a"], [b"a", b"b"], [np.float32(1)], [np.float32(1)] * 2])
def test_predictions_that_have_no_axis_are_joined(values):
    ours = concatenated(values)
    theirs = convert_to_np_if_not_ragged(
        potentially_ragged_concat([tf.constant(value) for value in values])
    )
    assert type(ours) is type(theirs)
    assert np.array_equal(ours, theirs)


def test_ragged_and_sparse_predictions_are_joined():
    ragged = [
        tf.ragged.constant([[1, 2], [3]]),
        tf.ragged.constant([[], [4, 5, 6]], dtype=tf.int32),
    ]
    assert as_list(concatenated(ragged)) == [[1, 2], [3], [], [4, 5, 6]]
    sparse = [tf.sparse.from_dense([[0, 1]]), tf.sparse.from_dense([[2, 0]])]
    assert as_list(tf.sparse.to_dense(concatenated(sparse))) == [[0, 1], [2, 0]]


@pytest.mark.parametrize("shape", [(), (3,), (3, 5), (2, 3, 5), (2, 2, 3, 5)])
def test_fans(shape):
    assert fans(shape) == compute_fans(shape)
    if len(shape) > 1:
        assert fans(shape, input_axes=[0], output_axes=[1]) == (shape[0], shape[1])
        assert fans(shape, input_axes=[0]) == compute_fans(shape)


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**31 + 5, 2**40 + 3, -1])
def test_seeds(seed):
    np.testing.assert_array_equal(drawn_seed(seed), _cast_seed(draw_seed(seed)))
    assert drawn_seed(seed).dtype == tf.int32


def test_a_seed_generator_moves_on():
    ours, theirs = keras.random.SeedGenerator(3), keras.random.SeedGenerator(3)
    for _ in range(3):
        np.testing.assert_array_equal(drawn_seed(ours), _cast_seed(draw_seed(theirs)))
