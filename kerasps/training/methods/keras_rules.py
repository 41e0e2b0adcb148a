"""Small rules of Keras's trainer about validation and the form of logs.

The rules copy private functions of Keras. `tests/unit/test_keras_rules.py` compares the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf


def check_compiled(model: keras.Model) -> None:
    """Check that a model is compiled.

    Raises ValueError if it is not.
    """
    if not model.compiled:
        raise ValueError("You must call `compile()` before using the model.")


def is_validated(epoch: int, validation_freq: object) -> bool:
    """Return whether `fit` evaluates its validation data after an epoch; the first one is 0.

    Raises ValueError if `validation_freq` is neither.
    """
    if isinstance(validation_freq, int):
        return (epoch + 1) % validation_freq == 0
    if isinstance(validation_freq, list):
        return epoch + 1 in validation_freq
    raise ValueError(
        "Argument `validation_freq` is not a frequency. Expected: a number of epochs, or a list of "
        f"the epochs' numbers, from 1. Received: validation_freq={validation_freq!r}."
    )


def plain_logs(logs: Mapping[str, object] | None) -> dict[str, Any]:
    """Return logs as plain floats, flat and sorted by name; keep values that are not numbers."""
    plain: dict[str, Any] = {}
    for name, value in sorted((logs or {}).items()):
        if isinstance(value, dict):
            plain.update(plain_logs(value))
            continue
        plain[name] = keras.ops.convert_to_numpy(value) if tf.is_tensor(value) else value
        with contextlib.suppress(Exception):  # a user's value may raise any error
            plain[name] = float(plain[name])
    return plain
