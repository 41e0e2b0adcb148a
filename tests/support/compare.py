"""Trains the same model plainly and on the cluster, from the same weights and on the same data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import kerasps
from kerasps.variables.keras.slots import slots_of

BATCH_SIZE = 16
# A figure that luck decides, as with two workers, is wrong if it is off so many times in a row.
MAX_ATTEMPTS = 3


def dataset(data: tuple[Any, ...]) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data).repeat().batch(BATCH_SIZE)


def regression_data(
    num_features: int = 8, num_outputs: int = 1, num_examples: int = 320
) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(num_examples, num_features)).astype("float32")
    return x, np.tanh(x[:, :num_outputs]) + 0.1 * x[:, -1:].astype("float32")


def train_both(
    strategy: kerasps.ParameterServerStrategy,
    make_model: Callable[[], keras.Model],
    data: tuple[Any, ...],
    *,
    steps: int = 50,
    epochs: int = 1,
    sum_repeated_ids: bool = False,
    lazy: bool = False,
    **fit_arguments: Any,
) -> tuple[keras.Model, keras.Model]:
    """Returns the model that plain Keras trained and the one that the cluster trained.

    With `sum_repeated_ids`, the plain model sums the gradients of an id that a batch holds twice
    before they reach the optimizer, as kerasps does, and Keras on its other backends. Plain Keras
    on TensorFlow does not (its Adagrad adds up the squares of the parts, not the square of the
    sum), so there the two differ.

    With `lazy`, the plain model moreover puts rows of tables, and of their slots, back to what they
    were before a step that did not look them up: what `sparse_updates="lazy"` means.

    The plain model has learned: one that equals it has as well.

    `make_model` makes a compiled model; seeds are fixed before each call, so that both start with
    the same weights.
    """
    keras.utils.set_random_seed(7)
    plain = make_model()
    plain.steps_per_execution = 1
    if plain.built and plain.optimizer is not None:
        # Where Keras builds an optimizer while it traces the first step, what `build` assigns
        # (ScheduleFreeAdamW) is lost.
        plain.optimizer.build(plain.trainable_variables)
    if sum_repeated_ids or lazy:
        plain.optimizer.apply = SummedApply(plain.optimizer, lazy)
    first = FirstStep()
    plain.fit(
        dataset(data),
        steps_per_epoch=steps,
        epochs=epochs,
        verbose=0,
        shuffle=False,
        **{**fit_arguments, "callbacks": [first, *fit_arguments.get("callbacks", [])]},
    )
    assert_learned(plain, first.weights)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        ours = make_model()
    ours.fit(
        kerasps.DatasetCreator(lambda context: _of_first_worker(dataset(data), context)),
        steps_per_epoch=steps,
        epochs=epochs,
        verbose=0,
        **fit_arguments,
    )
    return plain, ours


def _of_first_worker(
    dataset: tf.data.Dataset, context: tf.distribute.InputContext
) -> tf.data.Dataset:
    """Leave the other workers without data: one worker alone updates in plain Keras's order."""
    return dataset if context.input_pipeline_id == 0 else dataset.take(0)


class SummedApply:
    """`Optimizer.apply` with the gradients of each id summed; if `lazy`, then only on the rows that
    have some.
    """

    def __init__(self, optimizer: Any, lazy: bool) -> None:
        self._optimizer = optimizer
        self._apply = optimizer.apply
        self._lazy = lazy

    def __call__(self, grads: list[Any], weights: Any = None) -> None:
        pairs = list(zip(grads, weights, strict=True))
        tables = [(g, w) for g, w in pairs if self._lazy and isinstance(g, tf.IndexedSlices)]
        before = [
            (v, self._touched(g, w), tf.identity(v))
            for g, w in tables
            for v in [w, *self._slots(w)]
        ]
        self._apply([tf.convert_to_tensor(g) for g in grads], weights)
        for variable, touched, old in before:
            variable.assign(tf.where(touched, variable, old))

    def _touched(self, gradient: tf.IndexedSlices, table: keras.Variable) -> tf.Tensor:
        ids = tf.reshape(gradient.indices, [-1, 1])
        counts = tf.scatter_nd(
            ids, tf.ones([tf.size(ids)], tf.int32), tf.cast([table.shape[0]], ids.dtype)
        )
        return (counts > 0)[:, None]

    def _slots(self, table: keras.Variable) -> list[keras.Variable]:
        index = [id(v) for v in self._optimizer._trainable_variables].index(id(table))
        return slots_of(self._optimizer)[index]


def assert_equal(
    plain: keras.Model, ours: keras.Model, *, relative: float = 1e-5, optimizer: bool = True
) -> None:
    """All weights, and the optimizer's state, are the same to `relative`, measured against the
    largest of each array.
    """
    assert len(plain.weights) == len(ours.weights)
    pairs = list(zip(plain.weights, ours.weights, strict=True))
    if optimizer:
        pairs += list(zip(plain.optimizer.variables, ours.optimizer.variables, strict=True))
    for expected, actual in pairs:
        expected_value, actual_value = expected.numpy(), actual.numpy()
        scale = max(float(np.abs(expected_value).max(initial=0.0)), 1e-3)
        np.testing.assert_allclose(
            actual_value,
            expected_value,
            rtol=0,
            atol=relative * scale,
            err_msg=f"{expected.path} differs",
            strict=True,
        )


class FirstStep(keras.callbacks.Callback):
    """Keeps the trainable weights as the first step left them; a step may have built them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[np.ndarray] | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.weights is None:
            self.weights = [v.numpy() for v in self.model.trainable_variables]


def assert_identical(plain: keras.Model, ours: keras.Model) -> None:
    """The models, and their optimizers, are the same bit for bit."""
    pairs = [*zip(plain.weights, ours.weights, strict=True)]
    pairs += zip(plain.optimizer.variables, ours.optimizer.variables, strict=True)
    for expected, actual in pairs:
        np.testing.assert_array_equal(
            actual.numpy(), expected.numpy(), err_msg=expected.path, strict=True
        )


def assert_learned(model: keras.Model, before: list[np.ndarray] | None) -> None:
    """At least one trainable weight is not what it was `before`: without this, equality could hold
    of two models that never trained.
    """
    assert before, "the model had no weights, or took no step"
    after = [v.numpy() for v in model.trainable_variables]
    assert any(not np.array_equal(old, new) for old, new in zip(before, after, strict=True)), (
        "no weight moved after the first step"
    )
