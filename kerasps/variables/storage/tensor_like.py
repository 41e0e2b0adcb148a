"""Objects that replace a `tf.Variable` and whose value another object stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

from kerasps import _compat


# A subclass, so that Keras and TensorFlow treat it as a tensor and convert it.
class TensorLike(tf.__internal__.types.Tensor):
    """An object in place of a `tf.Variable`. Each use of it as a tensor reads its value."""

    def read_value(self) -> tf.Tensor:
        """Return the current value."""
        raise NotImplementedError

    # With a NumPy array on the left, this object does the arithmetic, as a variable would.
    __array_priority__ = 100

    def value(self) -> tf.Tensor:
        """Return the current value, as a `tf.Variable` does."""
        return self.read_value()

    def numpy(self) -> Any:
        """Return the value as a NumPy array."""
        return self.read_value().numpy()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy  # `numpy` returns a copy
        return np.asarray(self.numpy(), dtype)

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __bool__(self) -> bool:
        return bool(self.read_value())

    def __iter__(self) -> Iterator[tf.Tensor]:
        return iter(self.read_value())

    # Element by element, like all comparisons of tensors.

    def __eq__(self, other: object) -> Any:
        return self.read_value() == other

    def __ne__(self, other: object) -> Any:
        return self.read_value() != other

    __hash__ = object.__hash__

    def __tf_tracing_type__(self, context: object) -> tf.TensorSpec:
        del context
        return tf.TensorSpec(self.shape, self.dtype)  # a `tf.function` gets it as a tensor

    def __tf_tensor__(self, dtype: object = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.read_value(), dtype, name=name)


def _overload(operator: str) -> None:
    def method(self: TensorLike, *args: object) -> tf.Tensor:
        return getattr(self.read_value(), operator)(*args)

    setattr(TensorLike, operator, method)


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
for _name in (*_ARITHMETIC, "and", "or", "xor"):
    _overload(f"__{_name}__")
    _overload(f"__r{_name}__")
for _name in ("neg", "abs", "invert", "lt", "le", "gt", "ge", "getitem"):
    _overload(f"__{_name}__")


def new_value(storage: Any, value: Any) -> tf.Tensor:
    """Return, as a tensor, a value to assign to a storage, or to add to it.

    Raises ValueError if its shape is not that of the storage.
    """
    value = tf.convert_to_tensor(value, storage.dtype)
    if not value.shape.is_compatible_with(storage.shape):
        raise ValueError(
            f"A new value must have the variable's shape. Expected: {tuple(storage.shape)} for "
            f"variable '{storage.name}'. Received: {value.shape}. Pass a value of that shape."
        )
    return value


def note_read(variable: Any) -> None:
    """Tell the recorders of gradients in this thread that a variable was read.

    These are each GradientTape, and each `tf.custom_gradient` whose function runs. A read of a
    `tf.Variable` notifies them; for other reads, call this before the value is returned as a
    tensor.
    """
    if variable.trainable:
        _compat.record_variable_access(variable)
        _compat.record_variable_access_to_watchers(variable)
