"""Variables of each kind, and what a plain one converts to."""

from __future__ import annotations

import math

import keras
import numpy as np
import tensorflow as tf

CONVERSIONS = {
    "int": int,
    "float": float,
    "complex": complex,
    "round": round,
    "text": lambda variable: f"{int(variable):03d} {float(variable):.2f}",
    "math": lambda variable: math.floor(variable) + math.sqrt(variable),
    "numpy": lambda variable: variable.numpy(),
    "array": np.array,
    "asarray": np.asarray,
    "float64": lambda variable: np.asarray(variable, "float64"),
    "sum": np.sum,
    "rows": list,
    "first row": lambda variable: variable[0],
    "positive": lambda variable: +variable,
    "equal": lambda variable: np.asarray(variable == 2.5),
    "not equal": lambda variable: np.asarray(variable != 0),
    "compared": lambda variable: "less" if variable < 3 else "more",
    "bits": lambda variable: [variable & 1, variable | 4, 3 ^ variable, ~variable],
    "truth": lambda variable: bool(variable == 2.5),
    "tensor": tf.convert_to_tensor,
}


def described(value):
    """What can be compared of a number, an array or a tensor: its type, and what is in it."""
    if isinstance(value, list):
        return [described(item) for item in value]
    if isinstance(value, np.ndarray):
        return np.ndarray, value.dtype, value.shape, value.flags.writeable, value.tolist()
    if tf.is_tensor(value):
        return "tensor", value.dtype, np.array(value).tolist()
    return type(value), np.asarray(value).tolist()


def conversions(variables):
    """What each of `variables`, and of what Keras keeps their values in, converts to.

    By name and conversion; the type of the error where it converts to nothing.
    """
    values = {
        f"value of {name}": variable.value
        for name, variable in variables.items()
        if isinstance(variable, keras.Variable)
    }
    found = {}
    for name, variable in {**variables, **values}.items():
        for conversion, convert in CONVERSIONS.items():
            try:
                found[name, conversion] = described(convert(variable))
            except Exception as exc:
                found[name, conversion] = type(exc)
    return found


def embeddings(num_rows=6):
    """The weight of an embedding."""
    layer = keras.layers.Embedding(num_rows, 2, embeddings_initializer="ones")
    layer.build(None)
    layer.embeddings.assign(np.arange(2.0 * num_rows, dtype="float32").reshape(num_rows, 2))
    return layer.embeddings


def small_variables():
    """Variables of Keras, and bare ones, that are not in shards."""
    mean = keras.metrics.Mean()
    mean.update_state([1.0, 2.5])
    optimizer = keras.optimizers.Adam(0.25)
    vector = keras.Variable([[1.0, 2.0]])
    optimizer.build([vector])
    return {
        "float": keras.Variable(2.5),
        "zero": keras.Variable(0, dtype="int64"),
        "frozen integer": keras.Variable(7, dtype="int32", trainable=False),
        "bool": keras.Variable(True, dtype="bool"),
        "bfloat16": keras.Variable(1.5, dtype="bfloat16"),
        "vector": vector,
        "one element": keras.Variable([4.0], trainable=False),
        "integers": keras.Variable([4, 5], dtype="int32"),
        "metric": mean.total,
        "seed": keras.random.SeedGenerator(3).state,
        "iterations": optimizer.iterations,
        "learning rate": optimizer._learning_rate,
        "slot": optimizer.variables[2],
        "bare": tf.Variable(3.5),
        "bare frozen integer": tf.Variable(0, trainable=False),
        "bare bool": tf.Variable(True),
        "bare vector": tf.Variable([1.0, 2.0], trainable=False),
    }
