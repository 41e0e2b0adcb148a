"""Packs many tensors into few, for the messages between a worker and one ps.

A record with named fields goes in, and the same record comes out. Small tensors are sent in one
flat tensor; only this module knows the offset of a field. A large tensor is sent alone: it is not
copied into a flat tensor and out of it, and is sent as soon as it is computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import tensorflow as tf

_Record = TypeVar("_Record")
_Tensor = TypeVar("_Tensor")


class WireSpec(tf.TensorSpec):
    """The spec of a tensor, and how it is sent.

    Args:
        dtype: its dtype before it is sent and after it has arrived.
        wire_dtype: the dtype in which it is sent. Default: `dtype`.
        is_large: whether it is sent separately, in no flat tensor. Its shape must be known.
        is_part: whether it is part of a tensor that the worker splits or joins on its CPU.
    """

    def __init__(
        self,
        shape: tf.TensorShape | Sequence[int | None],
        dtype: tf.DType,
        *,
        wire_dtype: tf.DType | None = None,
        is_large: bool = False,
        is_part: bool = False,
    ) -> None:
        super().__init__(shape, dtype)
        self.wire_dtype = wire_dtype or tf.as_dtype(dtype)
        self.is_large = is_large
        self.is_part = is_part


class Packing(Generic[_Record]):
    """Packs the small tensors of a structure end to end, in one flat tensor per carrier dtype.

    Elements of 4 and 8 bytes share a float32 carrier (bit for bit, so integers keep their values).
    Each other dtype has its own carrier. So a float32 model with integer counters is one tensor.

    Args:
        specs: a structure as `tf.nest` knows it (named tuples, lists, dicts) of `tf.TensorSpec`s.
            Only their first axes may be of unknown length. A leaf may be None, which takes no
            room. A `WireSpec` says how its tensor is sent.
    """

    def __init__(self, specs: _Record) -> None:
        self.specs = specs
        self._leaves: list[tf.TensorSpec] = leaves_of(specs)
        self._groups: dict[tf.DType, list[int]] = {}
        self._large: list[int] = []
        for index, spec in enumerate(self._leaves):
            if isinstance(spec, WireSpec) and spec.is_large:
                self._large.append(index)
            else:
                self._groups.setdefault(_carrier(wire_dtype_of(spec)), []).append(index)
        # Elements of the carrier; with an unknown first axis, per entry of that axis.
        self._sizes = [
            math.prod(_known(spec)) * _elements(wire_dtype_of(spec)) for spec in self._leaves
        ]
        self._unknown = [
            i for i, spec in enumerate(self._leaves) if not spec.shape.is_fully_defined()
        ]

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensors whose shapes are known."""
        known = [spec for i, spec in enumerate(self._leaves) if i not in self._unknown]
        return sum(math.prod(spec.shape) * wire_dtype_of(spec).size for spec in known)

    @property
    def carrier_specs(self) -> list[tf.TensorSpec]:
        """The `tf.TensorSpec` of each tensor that `pack` returns: the flat ones, then the large."""
        flat = [
            tf.TensorSpec(
                [
                    None
                    if set(indices) & set(self._unknown)
                    else sum(self._sizes[i] for i in indices)
                ],
                carrier,
            )
            for carrier, indices in self._groups.items()
        ]
        return flat + [
            tf.TensorSpec(spec.shape, wire_dtype_of(spec)) for spec in self._in(self._large)
        ]

    def _in(self, indices: Iterable[int]) -> list[tf.TensorSpec]:
        return [self._leaves[index] for index in indices]

    def in_parts(self, flats: Sequence[_Tensor], num_bytes: int) -> list[list[_Tensor]]:
        """Return the tensors that `pack` returns, in parts of at least `num_bytes` bytes.

        The flat ones are in the part of the first large one.
        """
        parts: list[list[_Tensor]] = [list(flats[: len(self._groups)])]
        size = 0
        for tensor, spec in zip(flats[len(self._groups) :], self._in(self._large), strict=True):
            if size >= num_bytes:
                parts.append([])
                size = 0
            parts[-1].append(tensor)
            size += math.prod(spec.shape) * wire_dtype_of(spec).size
        return parts

    def pack(self, record: _Record) -> list[tf.Tensor]:
        """Return the packed tensors of `record`, which has the shapes of the specs.

        Raises ValueError if `record` has another structure than the specs.
        """
        tensors = self._tensors_of(record)
        return self._laid_flat(tensors) + self._as_they_are(tensors, None)

    def _as_they_are(self, tensors: Sequence[tf.Tensor], device: str | None) -> list[tf.Tensor]:
        return [
            _cast(tensors[i], wire_dtype_of(self._leaves[i]), self._leaves[i], device)
            for i in self._large
        ]

    def unpack(self, flats: Sequence[tf.Tensor], lengths: Sequence[tf.Tensor] = ()) -> _Record:
        """Return the record that `pack` packed into `flats`.

        Args:
            lengths: int32 scalars: the length of each unknown first axis, in the order of the
                specs.
        """
        flats, tensors = self._without_large(flats)
        self._cut(flats, lengths, tensors)
        return self._record_of(self._as_specified(tensors))

    def _without_large(self, flats: Sequence[_Tensor]) -> tuple[Sequence[_Tensor], list[Any]]:
        """Return the flat tensors, and the list of leaves with only the large ones filled in."""
        tensors: list[Any] = [None] * len(self._leaves)
        number = len(self._groups)
        for index, tensor in zip(self._large, flats[number:], strict=True):
            tensors[index] = tensor
        return flats[:number], tensors

    def _as_specified(
        self, tensors: Sequence[tf.Tensor], device: str | None = None
    ) -> list[tf.Tensor]:
        return [
            _cast(tensor, spec.dtype, spec, device)
            for tensor, spec in zip(tensors, self._leaves, strict=True)
        ]

    def _cut(
        self,
        flats: Sequence[tf.Tensor],
        lengths: Sequence[tf.Tensor],
        tensors: list[tf.Tensor | None],
    ) -> None:
        """Cut the small leaves out of flat tensors, into their places in `tensors`."""
        known = dict(zip(self._unknown, lengths, strict=True))
        for flat, indices in zip(flats, self._groups.values(), strict=True):
            sizes = [self._sizes[i] * known[i] if i in known else self._sizes[i] for i in indices]
            if set(indices) & set(known):
                sizes = tf.stack(sizes)
            cut = [flat] if len(indices) == 1 else tf.split(flat, sizes, num=len(indices))
            for i, part in zip(indices, cut, strict=True):
                tensors[i] = _from_carrier(part, self._leaves[i])

    def pack_by_call(self, record: _Record, device: str | None = None) -> list[tf.Tensor]:
        """Return the result of `pack`, by a call of a function that is traced once.

        In a graph that packs many times, each call is one operation instead of a hundred.

        Args:
            device: the device that converts large tensors, except parts. Default: the current
                device.
        """
        tensors = self._tensors_of(record)
        flats = list(self._pack_function(*(tensors[index] for index in self._small)))
        for flat, spec in zip(flats, self.carrier_specs, strict=False):
            flat.set_shape(spec.shape)
        return flats + self._as_they_are(tensors, device)

    def unpack_by_call(
        self,
        flats: Sequence[tf.Tensor],
        lengths: Sequence[tf.Tensor] = (),
        device: str | None = None,
    ) -> _Record:
        """Return the result of `unpack`, by a call of a function that is traced once."""
        flats, tensors = self._without_large(flats)
        for index, tensor in zip(self._small, self._unpack_function(*flats, *lengths), strict=True):
            tensors[index] = tensor
        return self._record_of(self._as_specified(tensors, device))

    @functools.cached_property
    def _small(self) -> list[int]:
        """The leaves that are packed into flat tensors."""
        large = set(self._large)
        return [index for index in range(len(self._leaves)) if index not in large]

    def _tensors_of(self, record: _Record) -> list[tf.Tensor]:
        tf.nest.assert_same_structure(self.specs, record, check_types=False)
        tensors = leaves_of(record)
        if len(tensors) != len(self._leaves):
            raise ValueError(
                f"A record to pack has other fields than its specs. Expected: {self.specs}. "
                f"Received: {record}."
            )
        return self._as_specified(tensors)

    def _laid_flat(self, tensors: Sequence[tf.Tensor] | dict[int, tf.Tensor]) -> list[tf.Tensor]:
        flats = []
        for carrier, indices in self._groups.items():
            leaves = [tf.cast(tensors[i], wire_dtype_of(self._leaves[i])) for i in indices]
            parts = [tf.reshape(_to_carrier(tensor, carrier), [-1]) for tensor in leaves]
            flats.append(parts[0] if len(parts) == 1 else tf.concat(parts, 0))
        return flats

    @functools.cached_property
    def _pack_function(self) -> Any:
        def pack(*small: tf.Tensor) -> list[tf.Tensor]:
            return self._laid_flat(dict(zip(self._small, small, strict=True)))

        return _traced(pack, [tf.TensorSpec(None, spec.dtype) for spec in self._in(self._small)])

    @functools.cached_property
    def _unpack_function(self) -> Any:
        number = len(self._groups)

        def unpack(*given: tf.Tensor) -> list[tf.Tensor]:
            tensors: list[Any] = [None] * len(self._leaves)
            self._cut(given[:number], given[number:], tensors)
            return [tensors[index] for index in self._small]

        lengths = [tf.TensorSpec([], tf.int32)] * len(self._unknown)
        return _traced(unpack, [*self.carrier_specs[:number], *lengths])

    def unpack_numpy(self, flats: Sequence[np.ndarray]) -> _Record:
        """Return the record that `pack` packed into `flats`, as arrays on the coordinator."""
        flats, arrays = self._without_large(flats)
        for index in self._large:
            arrays[index] = arrays[index].astype(self._leaves[index].dtype.as_numpy_dtype)
        for flat, indices in zip(flats, self._groups.values(), strict=True):
            ends = np.cumsum([self._sizes[i] for i in indices])
            for i, part in zip(indices, np.split(flat, ends[:-1]), strict=True):
                spec = self._leaves[i]
                arrays[i] = (
                    np.ascontiguousarray(part)
                    .view(wire_dtype_of(spec).as_numpy_dtype)
                    .astype(spec.dtype.as_numpy_dtype)
                    .reshape(tuple(spec.shape))
                )
        return self._record_of(arrays)

    def _record_of(self, leaves: Sequence[object]) -> _Record:
        return filled(self.specs, leaves)


def leaves_of(structure: object) -> list[Any]:
    """Return the tensors of a structure, or their specs, without leaves that are None."""
    return [leaf for leaf in tf.nest.flatten(structure, expand_composites=True) if leaf is not None]


def filled(structure: _Record, leaves: Iterable[object]) -> _Record:
    """Return `structure` with its leaves replaced by `leaves`; None stays None."""
    remaining = iter(leaves)
    record: _Record = tf.nest.map_structure(
        lambda leaf: None if leaf is None else next(remaining), structure
    )
    return record


def specs_of(structure: _Record) -> _Record:
    """Return `structure` with each tensor replaced by its spec."""
    return filled(structure, [tf.TensorSpec(t.shape, t.dtype) for t in leaves_of(structure)])


def brought_to(device: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors of a worker on a ps, where each arrives once, and as soon as it is computed.

    If operations on the ps used the worker's tensor, even by a control edge, TensorFlow would send
    it again. An argument of a call to the ps waits on the worker until the call's other conditions
    are met.
    """
    with tf.device(device):
        return [tf.identity(tensor) for tensor in tensors]


def _traced(function: Callable[..., list[tf.Tensor]], specs: Sequence[tf.TensorSpec]) -> Any:
    # Traced for no graph and no device: the caller says where it runs.
    with tf.init_scope(), tf.device(None):
        return tf.function(function, autograph=False).get_concrete_function(*specs)


def _cast(tensor: tf.Tensor, dtype: tf.DType, spec: tf.TensorSpec, device: str | None) -> tf.Tensor:
    """Return a tensor in a dtype, converted on `device` unless it is a part."""
    if device is None or (isinstance(spec, WireSpec) and spec.is_part):
        return tf.cast(tensor, dtype)
    with tf.device(device):
        return tf.cast(tensor, dtype)


def wire_dtype_of(spec: tf.TensorSpec) -> tf.DType:
    """Return the dtype in which a tensor is sent."""
    return spec.wire_dtype if isinstance(spec, WireSpec) else spec.dtype


def _carrier(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype.size in (4, 8) and dtype != tf.bool else dtype


def _elements(dtype: tf.DType) -> int:
    return 2 if dtype.size == 8 else 1


def _to_carrier(tensor: tf.Tensor, carrier: tf.DType) -> tf.Tensor:
    return tensor if tensor.dtype == carrier else tf.bitcast(tensor, carrier)


def _from_carrier(flat: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    shape = [-1 if d is None else d for d in spec.shape]
    dtype = wire_dtype_of(spec)
    if flat.dtype != dtype:
        if dtype.size == 8:
            # A bitcast to a wider dtype takes the halves of each element from the last axis.
            flat = tf.reshape(flat, [*shape, 2])
        flat = tf.bitcast(flat, dtype)
    return tf.cast(tf.reshape(flat, shape), spec.dtype)


def _known(spec: tf.TensorSpec) -> list[int]:
    """Return the known lengths among the axes of `spec`."""
    return [d for d in spec.shape if d is not None]
