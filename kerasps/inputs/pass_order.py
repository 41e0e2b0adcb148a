"""The order of a pass over the data: its key, and the source of the next keys.

All workers get the key of a pass, so that they read the same elements in the same order.
"""

from __future__ import annotations

from typing import Any, Protocol

import keras
import tensorflow as tf


class PassOrder(Protocol):
    """Gives each pass over an input its key."""

    @property
    def key_spec(self) -> tf.TensorSpec:
        """The `tf.TensorSpec` of keys."""

    def next_key(self, epoch: int) -> tf.Tensor:
        """Return the key of a pass that begins with `epoch`. Call once per pass."""

    def state(self) -> dict[str, Any]:
        """Return the state that determines the next keys, in values that JSON can hold."""

    def restore(self, state: dict[str, Any], *, passes_to_repeat: int) -> None:
        """Continue from a state.

        Args:
            state: the result of `state`, possibly of another process.
            passes_to_repeat: the number of passes just before it whose keys `next_key` repeats.
        """


class EpochOrder:
    """An order whose keys are the numbers of the passes' first epochs; data come in one order."""

    key_spec = tf.TensorSpec([], tf.int64)

    def next_key(self, epoch: int) -> tf.Tensor:
        return tf.constant(epoch, tf.int64)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any], *, passes_to_repeat: int) -> None:
        """Do nothing: a key depends only on the epoch."""


class SeededOrder:
    """An order whose keys are a seed and the number of the pass's first epoch."""

    key_spec = tf.TensorSpec([2], tf.int64)

    def __init__(self, shuffled: bool) -> None:
        self._seed = int(keras.random.randint((), 0, 2**31 - 1)) if shuffled else 0

    def next_key(self, epoch: int) -> tf.Tensor:
        return tf.constant([self._seed, epoch], tf.int64)

    def state(self) -> dict[str, Any]:
        return {"seed": self._seed}

    def restore(self, state: dict[str, Any], *, passes_to_repeat: int) -> None:
        self._seed = int(state["seed"])


def key_to_json(key: tf.Tensor) -> list[Any]:
    """Return a key in values that JSON can hold."""
    values = key.numpy().ravel().tolist()
    return [value.hex() if isinstance(value, bytes) else value for value in values]


def key_from_json(values: list[Any], spec: tf.TensorSpec) -> tf.Tensor:
    """Return the key that `key_to_json` converted."""
    if spec.dtype == tf.string:
        values = [bytes.fromhex(value) for value in values]
    return tf.reshape(tf.constant(values, spec.dtype), spec.shape)
