"""Many tensors in few: what crosses the network between a worker and one ps travels as one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class Packing:
    """Lays tensors end to end, in one flat tensor per carrier dtype.

    Elements of 4 and 8 bytes share a float32 carrier (bit for bit, so integers pass unharmed); each other dtype has a carrier
    of its own. A model in float32 with its integer counters is therefore one tensor.

    Args:
        specs: the `tf.TensorSpec` of each tensor; the first axis alone may be of unknown length.
    """

    def __init__(self, specs: Sequence[tf.TensorSpec]) -> None:
        self._specs = list(specs)
        self._groups: dict[tf.DType, list[int]] = {}
        for index, spec in enumerate(self._specs):
            self._groups.setdefault(_carrier(spec.dtype), []).append(index)
        # Elements of the carrier, for a tensor whose first axis is unknown: per entry of it.
        self._sizes = [math.prod(_known(spec)) * _elements(spec.dtype) for spec in self._specs]
        self._unknown = [i for i, spec in enumerate(self._specs) if not spec.shape.is_fully_defined()]

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """The specs that the packing was made for."""
        return self._specs

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensors whose shapes are known."""
        known = [spec for i, spec in enumerate(self._specs) if i not in self._unknown]
        return sum(math.prod(spec.shape) * spec.dtype.size for spec in known)

    @property
    def carrier_specs(self) -> list[tf.TensorSpec]:
        """The `tf.TensorSpec` of each flat tensor that `pack` returns."""
        return [
            tf.TensorSpec([None if set(indices) & set(self._unknown) else sum(self._sizes[i] for i in indices)], carrier)
            for carrier, indices in self._groups.items()
        ]

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The flat tensors that hold `tensors`, which have the shapes and dtypes of the specs."""
        flats = []
        for carrier, indices in self._groups.items():
            parts = [tf.reshape(_to_carrier(tf.cast(tensors[i], self._specs[i].dtype), carrier), [-1]) for i in indices]
            flats.append(parts[0] if len(parts) == 1 else tf.concat(parts, 0))
        return flats

    def unpack(self, flats: Sequence[tf.Tensor], lengths: Sequence[tf.Tensor] = ()) -> list[tf.Tensor]:
        """The tensors that `pack` laid into `flats`.

        Args:
            flats: one tensor per carrier.
            lengths: int32 scalars: the length of each unknown first axis, in the order of the specs.
        """
        known = dict(zip(self._unknown, lengths, strict=True))
        tensors: list[Any] = [None] * len(self._specs)
        for flat, indices in zip(flats, self._groups.values(), strict=True):
            sizes = [self._sizes[i] * known[i] if i in known else self._sizes[i] for i in indices]
            if set(indices) & set(known):
                sizes = tf.stack(sizes)
            parts = [flat] if len(indices) == 1 else tf.split(flat, sizes, num=len(indices))
            for i, part in zip(indices, parts, strict=True):
                tensors[i] = _from_carrier(part, self._specs[i])
        return tensors

    def unpack_numpy(self, flats: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As `unpack`, for arrays on the coordinator."""
        arrays: list[Any] = [None] * len(self._specs)
        for flat, indices in zip(flats, self._groups.values(), strict=True):
            start = 0
            for i in indices:
                part = np.ascontiguousarray(flat[start : start + self._sizes[i]])
                arrays[i] = part.view(self._specs[i].dtype.as_numpy_dtype).reshape(tuple(self._specs[i].shape))
                start += self._sizes[i]
        return arrays


def brought_to(device: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors of a worker on a ps, where each arrives once, and as soon as it is known.

    Whatever on the ps uses the worker's own tensor, a control edge too, would have it sent again; an argument of a call to the
    ps waits on the worker until it knows that the call's other conditions are met.
    """
    with tf.device(device):
        return [tf.identity(tensor) for tensor in tensors]


def _carrier(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype.size in (4, 8) and dtype != tf.bool else dtype


def _elements(dtype: tf.DType) -> int:
    return 2 if dtype.size == 8 else 1


def _to_carrier(tensor: tf.Tensor, carrier: tf.DType) -> tf.Tensor:
    return tensor if tensor.dtype == carrier else tf.bitcast(tensor, carrier)


def _from_carrier(flat: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    shape = [-1 if d is None else d for d in spec.shape]
    if flat.dtype == spec.dtype:
        return tf.reshape(flat, shape)
    if spec.dtype.size == 8:
        flat = tf.reshape(flat, [*shape, 2])
    return tf.reshape(tf.bitcast(flat, spec.dtype), shape)


def _known(spec: tf.TensorSpec) -> list[int]:
    """The lengths of the axes of `spec` that are known."""
    return [d for d in spec.shape if d is not None]
