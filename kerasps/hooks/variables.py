"""The replacements of methods of `keras.Variable`, and of functions that read or watch one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.hooks.in_place import Original
from kerasps.runtime.connected import connected_strategy
from kerasps.step import Compute
from kerasps.variables import ParameterServerVariable, current_phase
from kerasps.variables.adoption import adopt_variable
from kerasps.variables.pooled_rows import held_by
from kerasps.variables.sharding import ShardedStorage, Sharding
from kerasps.variables.variable import make_parameter_server_variable


def make_variable(
    original: Original, self: keras.Variable, *args: object, **kwargs: object
) -> None:
    """`keras.Variable.__init__`: make one of ours while one of our strategies is current."""
    make_parameter_server_variable(self)
    original(self, *args, **kwargs)


def value(original: Original, self: keras.Variable) -> Any:
    """`keras.Variable.value`: adopt a variable that a step reads first."""
    return self.value if _adopts(self) else original(self)


def assign(original: Original, self: keras.Variable, value: object) -> Any:
    """`keras.Variable.assign`: adopt a variable that a step assigns first."""
    return self.assign(value) if _adopts(self) else original(self, value)


def _adopts(variable: keras.Variable) -> bool:
    """Adopt a variable that a step touches, if it was made elsewhere; return whether it was."""
    return (
        isinstance(current_phase(), Compute)
        and variable._value is not None
        and adopt_variable(connected_strategy(), variable)
    )


def take(original: Original, x: object, indices: object, axis: int | None = None) -> Any:
    """`keras.ops.take`: read rows of our variables; Keras's reads all of `x`."""
    if axis != 0 or not isinstance(x, ParameterServerVariable):
        return original(x, indices, axis)
    if isinstance(indices, tf.RaggedTensor):
        return indices.with_flat_values(x.take(indices.flat_values, from_end=True))
    if isinstance(indices, tf.SparseTensor):
        indices = tf.sparse.to_dense(indices)  # Keras too looks up id 0 where there is none
    return x.take(indices, from_end=True)


def lookup_sparse(
    original: Original, params: Iterable[object], *args: object, **kwargs: object
) -> Any:
    """`tf.nn.embedding_lookup_sparse`, as of its second half: read rows where it has a value."""
    return original([_of_value(param) for param in params], *args, **kwargs)


class _Rows(_compat.NativeObject):
    """Something that is looked up in, as TensorFlow hands it on to the look-up: not as a tensor."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)

    @property
    def handle(self) -> Any:
        # In a graph, TensorFlow asks where the look-up should be placed.
        held = self._held
        if tf.executing_eagerly():
            raise AttributeError
        if isinstance(held, ParameterServerVariable) and _storage_in_shards(held) is None:
            return held.handle
        return held_by(held.shards[0])[0].handle


def lookup(original: Original, params: object, *args: object, **kwargs: object) -> Any:
    """`tf.nn.embedding_lookup`: read rows of our variables; TensorFlow's reads all of each."""
    params = params if isinstance(params, (list, tuple)) else [params]
    return original([_Rows(p) if _is_ours(p) else p for p in params], *args, **kwargs)


def _of_value(tensor: tf.Tensor) -> Any:
    """Return the variable whose value a step was given as `tensor`; anything else as it is."""
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

    To a tape, such a variable is as many variables: no handle stands for all of them. And the value
    that a step was given of a variable may be none, where rows of it are all that the step wants.
    """
    if isinstance(current_phase(), Compute):
        sources = tf.nest.map_structure(_of_value, sources)
    flat, targets = tf.nest.flatten(sources), tf.nest.flatten(target)
    storages = [_in_shards(source) for source in flat]
    if not any(map(_is_ours, targets)) and all(storage is None for storage in storages):
        return original(self, target, sources, output_gradients, *args, **kwargs)
    weights: list[Any] = [None] * len(targets)
    if output_gradients is not None:
        weights = tf.nest.flatten(output_gradients)
    # A variable that is a target has the gradient one with respect to itself, and no other.
    itself = [pair for pair in zip(targets, weights, strict=True) if _is_ours(pair[0])]
    others = [pair for pair in zip(targets, weights, strict=True) if not _is_ours(pair[0])]

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


def _is_ours(thing: object) -> bool:
    return isinstance(thing, (ParameterServerVariable, ShardedStorage))


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
    """Return the gradients with respect to sources.

    Args:
        call: returns gradients with respect to variables in a nested list, as such a list.
        sources: with respect to which they are wanted.
        storages: of each, the storage, where it is in shards.
    """
    expanded = [
        source if storage is None else storage.watched
        for source, storage in zip(sources, storages, strict=True)
    ]
    return [
        gradient if storage is None else storage.joined_gradient(gradient)
        for gradient, storage in zip(call(expanded), storages, strict=True)
    ]


def watch(original: Original, self: tf.GradientTape, tensor: object) -> None:
    """`tf.GradientTape.watch`: watch each shard; in a step, the tensor in a variable's place."""
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
    """Return a variable in shards, of ours or of TensorFlow's, as a storage; else None."""
    storage = _storage_in_shards(source)
    return _of_tensorflow(source) if storage is None else storage


def _of_tensorflow(source: object) -> ShardedStorage | None:
    """Return a `ShardedVariable` of TensorFlow's as a storage; its rows are dealt out in ranges."""
    if not isinstance(source, _compat.ShardedVariable):
        return None
    num_rows, num_shards = int(source.shape[0]), len(source.variables)
    return ShardedStorage(source.variables, Sharding(num_rows, num_shards, "div"), source.name)


def _storage_in_shards(source: object) -> ShardedStorage | None:
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
