"""The specs of what a step holds of a variable."""

from __future__ import annotations

import tensorflow as tf

from kerasps.step.records.packing import LargeSpec
from kerasps.variables import ParameterServerVariable, Shard

# A value of more bytes travels as it is. To copy as many into a flat tensor and out of it takes
# longer than to send one more tensor.
LARGE_BYTES = 2**18


def spec_of(variable: ParameterServerVariable) -> tf.TensorSpec:
    """Return the `tf.TensorSpec` of a variable's storage."""
    return tf.TensorSpec(variable.storage.shape, variable.storage.dtype)


def dense_spec(shard: Shard) -> tf.TensorSpec:
    """Return the `tf.TensorSpec` of a value of a whole shard, or of a gradient; it may be large."""
    spec = shard.spec
    is_large = spec.shape.num_elements() * spec.dtype.size > LARGE_BYTES
    return LargeSpec(spec.shape, spec.dtype) if is_large else spec


def rows_spec(table: ParameterServerVariable) -> tf.TensorSpec:
    """Return the `tf.TensorSpec` of some rows of a table."""
    spec = spec_of(table)
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)
