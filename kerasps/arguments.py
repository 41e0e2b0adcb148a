"""What the arguments of `fit`, `evaluate` and `predict` may be; asked before anything is sent or traced."""

from __future__ import annotations

import operator
from typing import Any

import keras
import numpy as np

from kerasps.errors import InputError

_HINTS = {
    "steps": "Leave it out to read all the data. (A `cardinality()` of -1 says that data never end, and -2 that nobody knows.)",
    "batch_size": "Leave it out for batches of 32.",
    "epochs": "Each epoch is one pass over the data, or `steps_per_epoch` steps.",
}


def whole_number(name: str, value: Any, *, least: int = 1) -> int | None:
    """The argument `name`, a whole number or None; of any type that Python takes as an index.

    Raises:
        InputError: it is something else, or less than `least`.
    """
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        hint = next(text for kind, text in _HINTS.items() if kind in name)
        raise InputError(
            f"Argument `{name}` must be a whole number that is at least {least}. Received: {name}={value!r}. {hint}"
        )
    return number


def no_batches(method: str) -> InputError:
    """The error of input in which `method` has found nothing."""
    return InputError(
        f"`{method}` found no data. Expected: at least one batch. Received: input without any. Look at what filters it, and "
        "whether a generator or an iterator was read before."
    )


def check_arrays(**arguments: Any) -> None:
    """Raises `InputError` where an argument holds something that is no array: a string, a number, an object.

    Args:
        arguments: x, y and sample_weight: arrays, or lists, tuples and dictionaries of them; None for what is not given.
    """
    for name, value in arguments.items():
        for leaf in keras.tree.flatten(value):
            if leaf is not None and not _is_array(leaf):
                raise InputError(
                    f"`{name}` is no input. Expected: arrays, tensors or data frames with an example in each row, or lists and "
                    f"dictionaries of them; for x also a `tf.data.Dataset`, a `keras.utils.PyDataset`, a generator or a "
                    f"`kerasps.DatasetCreator`. Received: {_described(name, value, leaf)}. {_hint(leaf)}"
                )
    if arguments["x"] is None or not keras.tree.flatten(arguments["x"]):
        raise InputError(
            "There is no input. Expected: arrays, a `tf.data.Dataset`, a `keras.utils.PyDataset`, a generator or a "
            f"`kerasps.DatasetCreator`. Received: x={arguments['x']!r}."
        )


def _is_array(leaf: Any) -> bool:
    shape = getattr(leaf, "shape", None)
    return shape is not None and getattr(shape, "rank", len(shape)) != 0


def _described(name: str, value: Any, leaf: Any) -> str:
    shown = repr(leaf)
    shown = f"{shown[:60]}…" if len(shown) > 60 else shown
    return (
        f"{name}={shown} of type {type(leaf).__name__}" if value is leaf else f"{shown} of type {type(leaf).__name__} in {name}"
    )


def _hint(leaf: Any) -> str:
    if isinstance(leaf, (str, bytes)):
        return (
            "To read a file, use `tf.data` (`TextLineDataset`, `TFRecordDataset`, `make_csv_dataset`) or pandas; strings as "
            "data go into an array, `np.array([...])`."
        )
    if isinstance(leaf, (int, float, np.generic)):
        return "Make an array of numbers: `np.array([...])`."
    return "Make an array of it, or a dataset."
