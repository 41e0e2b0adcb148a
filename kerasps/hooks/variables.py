"""The replacements of methods of `keras.Variable`, and of functions that read or watch one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.dynamic.local.local_rows import becomes_slot
from kerasps.hooks.in_place import Original
from kerasps.runtime.connected import connected_strategy
from kerasps.step import Compute
from kerasps.variables import ParameterServerVariable, current_phase
from kerasps.variables.keras.adoption import adopt_variable, is_of_strategy
from kerasps.variables.keras.variable import make_parameter_server_variable
from kerasps.variables.rows.pooled_rows import store_of
from kerasps.variables.rows.sharding import InBlocks, ShardedStorage


def make_variable(
    original: Original, self: keras.Variable, *args: object, **kwargs: object
) -> None:
    """`keras.Variable.__init__`: make a variable of ours while a strategy of ours is current."""
    if not becomes_slot(self):
        make_parameter_server_variable(self)
    original(self, *args, **kwargs)


def value(original: Original, self: keras.Variable) -> Any:
    """`keras.Variable.value`: adopt a variable before a step reads it."""
    return self.value if _adopts(self) else original(self)


def assign(original: Original, self: keras.Variable, value: object) -> Any:
    """`keras.Variable.assign`: adopt a variable before a step assigns it."""
    return self.assign(value) if _adopts(self) else original(self, value)


def _adopts(variable: keras.Variable) -> bool:
    """Adopt a variable that a step uses, if it was made elsewhere; return True if it was."""
    return (
        isinstance(current_phase(), Compute)
        and variable._value is not None
        and adopt_variable(connected_strategy(), variable)
    )


def take(original: Original, x: object, indices: object, axis: int | None = None) -> Any:
    """`keras.ops.take`: read only the rows needed of our variables; Keras's reads all of `x`."""
    if axis != 0 or not isinstance(x, ParameterServerVariable):
        return original(x, indices, axis)
    if isinstance(indices, tf.RaggedTensor):
        return indices.with_flat_values(x.take(indices.flat_values, from_end=True))
    if isinstance(indices, tf.SparseTensor):
        indices = tf.sparse.to_dense(indices)  # as in Keras, a missing id looks up id 0
    return x.take(indices, from_end=True)


def lookup_sparse(
    original: Original, params: Iterable[object], *args: object, **kwargs: object
) -> Any:
    """The second half of `tf.nn.embedding_lookup_sparse`: read only rows if given a value."""
    return original([_of_value(param) for param in params], *args, **kwargs)


def count_params(original: Original, weights: Iterable[keras.Variable]) -> int:
    """`count_params` of a layer, and of a summary: tables of any ids count the rows they have."""
    sizes, others = _with_rows(weights)
    return int(original(others)) + sum(size for size, _ in sizes)


def memory_size(original: Original, weights: Iterable[keras.Variable]) -> float:
    """`weight_memory_size` of a summary: tables of any ids count the rows they have."""
    sizes, others = _with_rows({id(weight): weight for weight in weights}.values())
    return float(original(others)) + sum(size * item for size, item in sizes)


def _with_rows(
    weights: Iterable[keras.Variable],
) -> tuple[list[tuple[int, int]], list[keras.Variable]]:
    """Return the elements and their bytes of each table without a vocabulary; and all others."""
    weights = list(weights)
    tables = [weight for weight in weights if not getattr(weight, "has_whole_value", True)]
    others = [weight for weight in weights if getattr(weight, "has_whole_value", True)]
    sizes = [
        (table.num_rows * int(table.shape[1]), int(tf.as_dtype(table.dtype).size))
        for table in tables
    ]
    return sizes, others


class _Rows(_compat.base_class("NativeObject")):  # type: ignore[misc]
    """A variable of ours that TensorFlow passes on to the lookup, and does not read as a tensor."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)

    @property
    def handle(self) -> Any:
        # In a graph, TensorFlow places the lookup by this handle.
        held = self._held
        if tf.executing_eagerly():
            raise AttributeError
        if isinstance(held, ParameterServerVariable) and _storage_in_shards(held) is None:
            return held.handle
        return store_of(held.shards[0]).holder.handle


def lookup(original: Original, params: object, *args: object, **kwargs: object) -> Any:
    """`tf.nn.embedding_lookup`: read only the rows needed of our variables, not all rows."""
    params = params if isinstance(params, (list, tuple)) else [params]
    return original([_Rows(p) if is_of_strategy(p) else p for p in params], *args, **kwargs)


def _of_value(tensor: tf.Tensor) -> Any:
    """Return the variable whose value a step got as `tensor`; other tensors unchanged."""
    phase = current_phase()
    return phase.value_reads.variable_of(tensor) if isinstance(phase, Compute) else tensor


def gradient(
    original: Original,
    self: tf.GradientTape,
    target: object,
    sources: object,
    output_gradients: object = None,
    *args: object,
    **kwargs: object,
) -> Any:
    """`tf.GradientTape.gradient`: take the gradients of a variable in shards shard by shard.

    A tape sees each shard as a variable, since no handle stands for all of them. And if a step
    reads only rows of a variable, the value that the step got is only a tensor of zeros.
    """
    if isinstance(current_phase(), Compute):
        sources = tf.nest.map_structure(_of_value, sources)
    flat, targets = tf.nest.flatten(sources), tf.nest.flatten(target)
    storages = [_in_shards(source) for source in flat]
    if not any(map(is_of_strategy, targets)) and all(storage is None for storage in storages):
        return original(self, target, sources, output_gradients, *args, **kwargs)
    weights: list[Any] = [None] * len(targets)
    if output_gradients is not None:
        weights = tf.nest.flatten(output_gradients)
    # The gradient of a target variable is one with respect to itself, and none for others.
    itself = [pair for pair in zip(targets, weights, strict=True) if is_of_strategy(pair[0])]
    others = [pair for pair in zip(targets, weights, strict=True) if not is_of_strategy(pair[0])]

    def of_others(expanded: list[Any]) -> Any:
        given = None if output_gradients is None else [weight for _, weight in others]
        return original(self, [other for other, _ in others], expanded, given, *args, **kwargs)

    joined = _shard_by_shard(of_others, flat, storages)
    for number, source in enumerate(flat):
        for variable, weight in itself:
            if source is variable:
                one = tf.ones_like(variable) if weight is None else tf.convert_to_tensor(weight)
                before = joined[number]
                joined[number] = one if before is None else one + tf.convert_to_tensor(before)
    return tf.nest.pack_sequence_as(sources, joined)


def gradients_in_graph(
    original: Original, ys: object, xs: object, *args: object, **kwargs: object
) -> Any:
    """`tf.gradients`: take the gradients of a variable in shards shard by shard."""
    flat = list(xs) if isinstance(xs, (list, tuple)) else [xs]
    storages = [_storage_in_shards(source) for source in flat]
    if all(storage is None for storage in storages):
        return original(ys, xs, *args, **kwargs)
    return _shard_by_shard(
        lambda expanded: tf.nest.pack_sequence_as(
            expanded, original(ys, tf.nest.flatten(expanded), *args, **kwargs)
        ),
        flat,
        storages,
    )


def _shard_by_shard(
    call: Callable[[list[Any]], list[Any]],
    sources: Sequence[object],
    storages: Sequence[ShardedStorage | None],
) -> list[Any]:
    """Return the gradients with respect to sources."""
    expanded = [
        source if storage is None else storage.watched
        for source, storage in zip(sources, storages, strict=True)
    ]
    return [
        gradient if storage is None else storage.joined_gradient(gradient)
        for gradient, storage in zip(call(expanded), storages, strict=True)
    ]


def watch(original: Original, self: tf.GradientTape, tensor: object) -> None:
    """`tf.GradientTape.watch`: watch each shard, or in a step the tensor of a variable."""
    original(self, [_watched(_of_value(t)) for t in tf.nest.flatten(tensor)])


def _watched(source: object) -> Any:
    storage = _in_shards(source)
    if storage is not None:
        return storage.watched
    if not isinstance(source, ParameterServerVariable):
        return source
    in_graph = source.resolves_through() is not None or source.compiled_graph() is not None
    return source.handle if in_graph else source.storage


def _in_shards(source: object) -> ShardedStorage | None:
    """Return the storage of a variable in shards, ours or TensorFlow's; else None."""
    storage = _storage_in_shards(source)
    return _of_tensorflow(source) if storage is None else storage


def _of_tensorflow(source: object) -> ShardedStorage | None:
    """Return a `ShardedVariable` of TensorFlow as a storage; its shards are ranges of rows."""
    if not isinstance(source, tf.__internal__.distribute.ShardedVariable):
        return None
    num_rows, num_shards = int(source.shape[0]), len(source.variables)
    return ShardedStorage(source.variables, InBlocks(num_rows, num_shards), source.name)


def _storage_in_shards(source: object) -> ShardedStorage | None:
    """Return the storage that a tape sees as several variables; None for other sources.

    None in a step too, where tensors replace variables.
    """
    if (
        isinstance(source, ParameterServerVariable)
        and current_phase() is None
        and source.compiled_graph() is None
    ):
        source = source.storage
    return source if isinstance(source, ShardedStorage) else None
