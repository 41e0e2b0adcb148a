"""The specs of what a step holds of a variable."""

from __future__ import annotations

import tensorflow as tf

from kerasps.variables import ParameterServerVariable


def spec_of(variable: ParameterServerVariable) -> tf.TensorSpec:
    """Return the `tf.TensorSpec` of a variable's storage."""
    return tf.TensorSpec(variable.storage.shape, variable.storage.dtype)


def rows_spec(table: ParameterServerVariable) -> tf.TensorSpec:
    """Return the `tf.TensorSpec` of some rows of a table."""
    spec = spec_of(table)
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
