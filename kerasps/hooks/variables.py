"""What is called in place of the methods of `keras.Variable`, and of what reads and watches one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster import connected_strategy
from kerasps.step import Compute
from kerasps.variables import (
    ParameterServerVariable,
    ShardedStorage,
    Sharding,
    adopt_variable,
    current_phase,
    make_parameter_server_variable,
)


def make_variable(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """`keras.Variable.__init__`: make one of ours while one of our strategies is current."""
    make_parameter_server_variable(self)
    original(self, *args, **kwargs)


def value(original: Any, self: Any) -> Any:
    """`keras.Variable.value`: adopt a variable that a step reads first."""
    return self.value if _adopts(self) else original(self)


def assign(original: Any, self: Any, value: Any) -> Any:
    """`keras.Variable.assign`: adopt a variable that a step assigns first."""
    return self.assign(value) if _adopts(self) else original(self, value)


def _adopts(variable: Any) -> bool:
    """Adopt a variable that a step touches, if it was made elsewhere; return whether it was."""
    return (
        isinstance(current_phase(), Compute)
        and variable._value is not None
        and adopt_variable(connected_strategy(), variable)
    )


def take(original: Any, x: Any, indices: Any, axis: int | None = None) -> Any:
    """`keras.ops.take`: read rows of our variables; Keras's reads all of `x`."""
    if axis != 0 or not isinstance(x, ParameterServerVariable):
        return original(x, indices, axis)
    if isinstance(indices, tf.RaggedTensor):
        return indices.with_flat_values(x.take(indices.flat_values, from_end=True))
    if isinstance(indices, tf.SparseTensor):
        indices = tf.sparse.to_dense(indices)  # Keras too looks up id 0 where there is none
    return x.take(indices, from_end=True)


def lookup_sparse(original: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
    """`tf.nn.embedding_lookup_sparse`, as of its second half: read rows where it has a value."""
    return original([_of_value(param) for param in params], *args, **kwargs)


def _of_value(tensor: Any) -> Any:
    """Return the variable whose value a step was given as `tensor`; anything else as it is."""
    phase = current_phase()
    return phase.value_reads.variable_of(tensor) if isinstance(phase, Compute) else tensor


def gradient(original: Any, self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
    """`tf.GradientTape.gradient`: take the gradients of a variable in shards shard by shard.

    To a tape, such a variable is as many variables: no handle stands for all of them. And the value
    that a step was given of a variable may be none, where rows of it are all that the step wants.
    """
    if isinstance(current_phase(), Compute):
        sources = tf.nest.map_structure(_of_value, sources)
    flat = tf.nest.flatten(sources)
    storages = [_storage_in_shards(source) or _of_tensorflow(source) for source in flat]
    if all(storage is None for storage in storages):
        return original(self, target, sources, *args, **kwargs)
    expanded = [
        source if own is None else own.watched for own, source in zip(storages, flat, strict=True)
    ]
    gradients = original(self, target, expanded, *args, **kwargs)
    joined = [
        g if own is None else own.joined_gradient(g)
        for own, g in zip(storages, gradients, strict=True)
    ]
    return tf.nest.pack_sequence_as(sources, joined)


def watch(original: Any, self: Any, tensor: Any) -> None:
    """`tf.GradientTape.watch`: watch each shard."""
    watched = [
        t if (storage := _storage_in_shards(t) or _of_tensorflow(t)) is None else storage.watched
        for t in map(_of_value, tf.nest.flatten(tensor))
    ]
    original(self, watched)


def _of_tensorflow(source: Any) -> ShardedStorage | None:
    """Return a `ShardedVariable` of TensorFlow's as a storage; its rows are dealt out in ranges."""
    if not isinstance(source, _compat.ShardedVariable):
        return None
    num_rows, num_shards = int(source.shape[0]), len(source.variables)
    return ShardedStorage(source.variables, Sharding(num_rows, num_shards, "div"), source.name)


def _storage_in_shards(source: Any) -> ShardedStorage | None:
    """Return the storage that a tape sees as several variables; None for other sources.

    None in a step too, which has tensors in place of variables.
    """
    if (
        isinstance(source, ParameterServerVariable)
        and current_phase() is None
        and source.compiled_graph() is None
    ):
        source = source.storage
    return source if isinstance(source, ShardedStorage) else None
