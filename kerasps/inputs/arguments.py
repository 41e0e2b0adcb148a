"""Checks the arguments of `fit`, `evaluate` and `predict`, before anything is sent or traced."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.checks import count
from kerasps.errors import InputError

_HINTS = {
    "steps": "Leave it out to read all the data. (A `cardinality()` of -1 means that data never "
    "end, and -2 that their length is unknown.)",
    "batch_size": "Leave it out for batches of 32.",
    "epochs": "Each epoch is one pass over the data, or `steps_per_epoch` steps.",
}


def whole_number(name: str, value: object, *, least: int = 1) -> int | None:
    """Return an argument that is a whole number, or None, as an `int` or None."""
    if value is None:
        return None
    try:
        # `epochs=True` means one epoch in Keras, and here.
        return count(
            f"Argument `{name}` must be a whole number that is at least {least}",
            int(value) if isinstance(value, bool) else value,
            least=least,
            received=f"{name}={value!r}",
            advice=next(text for kind, text in _HINTS.items() if kind in name),
        )
    except (TypeError, ValueError) as exc:
        raise InputError(str(exc)) from None


def no_batches(method: str) -> InputError:
    """Return the error for input in which `method` found no batch."""
    return InputError(
        f"`{method}` found no data. Expected: at least one batch. Received: input without any. "
        "Check the filters of the data, and that a generator or an iterator was not read before."
    )


_ALSO = (
    "; for x also a `tf.data.Dataset`, a `keras.utils.PyDataset`, a generator or a "
    "`kerasps.DatasetCreator`"
)


def check_arrays(*, is_batch: bool = False, **arguments: object) -> None:
    """Raise `InputError` if an argument contains something other than arrays."""
    for name, value in arguments.items():
        for leaf in keras.tree.flatten(value):
            if leaf is not None and not _is_array(leaf):
                raise InputError(
                    f"`{name}` is no input. Expected: arrays, tensors or data frames with one "
                    f"example per row, or lists and dictionaries of them"
                    f"{'' if is_batch else _ALSO}. Received: {_described(name, value, leaf)}. "
                    f"{_hint(leaf, is_batch)}"
                )
    if arguments["x"] is None or not keras.tree.flatten(arguments["x"]):
        raise InputError(
            "There is no input. Expected: arrays or tensors with one example per row"
            f"{'' if is_batch else _ALSO}. Received: x={arguments['x']!r}. Pass the data as x."
        )


def _is_array(leaf: object) -> bool:
    shape = getattr(leaf, "shape", None)
    return shape is not None and getattr(shape, "rank", len(shape)) != 0


def _described(name: str, value: object, leaf: object) -> str:
    shown = repr(leaf)
    shown = f"{shown[:60]}…" if len(shown) > 60 else shown
    return (
        f"{name}={shown} of type {type(leaf).__name__}"
        if value is leaf
        else f"{shown} of type {type(leaf).__name__} in {name}"
    )


def check_array(array: np.ndarray) -> None:
    """Raise `InputError` if TensorFlow cannot make a tensor of an array."""
    if array.dtype.kind in "OMmV":
        wrong: Any = f"an array of dtype {array.dtype}"
        advice = "Convert it to numbers, for example by `array.astype('float32')`."
        if array.dtype.kind == "O":
            kinds = {type(item).__name__ for item in array.ravel()}
            wrong += f" and shape {array.shape}, of objects of type {', '.join(sorted(kinds))}"
            advice = (
                "Make all rows equally long, and all entries of one type; fill in missing values "
                "(`DataFrame.fillna`)."
            )
        raise InputError(
            "An array holds objects that are neither numbers nor strings. Expected: a rectangular "
            f"array of one dtype. Received: {wrong}. {advice}"
        )


def is_of_strings(array: np.ndarray) -> bool:
    """Return whether an array of objects contains only strings."""
    return all(isinstance(item, (str, bytes)) for item in array.ravel())


def _hint(leaf: object, is_batch: bool) -> str:
    is_many = hasattr(leaf, "__next__") or isinstance(leaf, tf.data.Dataset) or callable(leaf)
    if is_batch and is_many:
        return "Pass the arrays of one batch; `fit`, `evaluate` and `predict` read datasets."
    if isinstance(leaf, (str, bytes)):
        return (
            "To read a file, use `tf.data` (`TextLineDataset`, `TFRecordDataset`, "
            "`make_csv_dataset`) or pandas; put strings that are data into `np.array([...])`."
        )
    if isinstance(leaf, (int, float, np.generic)):
        return "Make an array of numbers: `np.array([...])`."
    return "Make an array of it, or a dataset."
