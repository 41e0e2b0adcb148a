"""The specs of the values that a step holds and sends for a variable."""

from __future__ import annotations

import tensorflow as tf

from kerasps.step.records.packing import WireSpec
from kerasps.variables import ParameterServerVariable, Shard

# A larger tensor is sent separately. Copying this many bytes into a flat tensor and out of it takes
# longer than sending one more tensor.
LARGE_BYTES = 2**18


def spec_of(variable: ParameterServerVariable) -> tf.TensorSpec:
    """Return the `tf.TensorSpec` of a variable's storage."""
    return tf.TensorSpec(variable.storage.shape, variable.storage.dtype)


def rows_spec(table: ParameterServerVariable) -> tf.TensorSpec:
    """Return the `tf.TensorSpec` of some rows of a table."""
    spec = spec_of(table)
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def sent_state(shard: Shard) -> WireSpec:
    """Return the spec of a change of a shard of some state, as it is sent: in full precision."""
    return _sent(shard, shard.spec.dtype)


def sent_value(shard: Shard) -> WireSpec:
    """Return the spec of the value of a shard, or of its gradient, as it is sent."""
    return _sent(shard, shard.variable.wire_dtype)


def sent_part(shard: Shard) -> WireSpec:
    """Return the spec of a value or gradient that is sent end to end with others."""
    return WireSpec(shard.spec.shape, shard.spec.dtype, wire_dtype=shard.variable.wire_dtype)


def sent_rows(table: ParameterServerVariable) -> WireSpec:
    """Return the spec of some rows of a table, or of their gradients, as they are sent."""
    spec = rows_spec(table)
    return WireSpec(spec.shape, spec.dtype, wire_dtype=table.wire_dtype)


def _sent(shard: Shard, wire_dtype: tf.DType | None) -> WireSpec:
    spec, is_part = shard.spec, shard.variable.sharding is not None
    is_large = spec.shape.num_elements() * spec.dtype.size > LARGE_BYTES
    return WireSpec(
        spec.shape, spec.dtype, wire_dtype=wire_dtype, is_large=is_large, is_part=is_part
    )
