"""A record goes into a packing, and the same record comes out."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from kerasps.step.records.packing import Packing, WireSpec, filled, leaves_of, specs_of

DTYPES = ["float32", "int64", "int32", "uint32", "bool", "float16", "bfloat16", "float64", "uint8"]


class Pair(NamedTuple):
    first: Any
    second: Any


def random_record(generator, depth=3):
    """Return a random structure of random arrays, some of them absent."""
    kind = generator.integers(6 if depth else 2)
    if kind == 0:
        return None
    if kind in (1, 2):
        shape = generator.integers(0, 4, size=generator.integers(0, 4))
        dtype = tf.as_dtype(DTYPES[generator.integers(len(DTYPES))])
        return generator.integers(0, 2**7, size=shape).astype(dtype.as_numpy_dtype)
    inner = [random_record(generator, depth - 1) for _ in range(generator.integers(0, 4))]
    if kind == 3:
        return Pair(inner, random_record(generator, depth - 1))
    if kind == 4:
        return {str(number): part for number, part in enumerate(inner)}
    return inner


def assert_same(actual, expected):
    tf.nest.assert_same_structure(actual, expected)
    assert len(leaves_of(actual)) == len(leaves_of(expected))
    for leaf, other in zip(leaves_of(actual), leaves_of(expected), strict=True):
        array = leaf.numpy() if tf.is_tensor(leaf) else leaf
        # A scalar is a number of NumPy's, not an array, when it comes out of a tensor.
        np.testing.assert_array_equal(np.asarray(array, other.dtype), other, strict=True)


@pytest.mark.parametrize("seed", range(40))
def test_any_record_comes_back_as_it_was(seed):
    generator = np.random.default_rng(seed)
    record = Pair(random_record(generator), random_record(generator))
    tensors = filled(record, [tf.constant(array) for array in leaves_of(record)])
    specs = leaves_of(specs_of(tensors))
    large = [seed % 2 and generator.random() < 0.3 for _ in specs]
    packing = Packing(
        filled(
            record,
            [
                WireSpec(spec.shape, spec.dtype, is_large=True) if is_large else spec
                for spec, is_large in zip(specs, large, strict=True)
            ],
        )
    )
    flats = packing.pack(tensors)
    assert [tf.TensorSpec(flat.shape, flat.dtype) for flat in flats] == packing.carrier_specs
    num_flat = len(flats) - sum(large)
    assert num_flat == len({flat.dtype for flat in flats[:num_flat]})
    as_they_are = [
        leaf for leaf, is_large in zip(leaves_of(tensors), large, strict=True) if is_large
    ]
    assert all(leaf is flat for leaf, flat in zip(as_they_are, flats[num_flat:], strict=True))
    assert packing.num_bytes == sum(array.nbytes for array in leaves_of(record))
    assert_same(packing.unpack(flats), record)
    assert_same(packing.unpack_by_call(packing.pack_by_call(tensors)), record)
    assert_same(packing.unpack_numpy([flat.numpy() for flat in flats]), record)


@pytest.mark.parametrize("way", ["eager", "graph", "call"])
def test_axes_of_unknown_length_come_back_where_their_lengths_are_told(way):
    specs = {
        "rows": [tf.TensorSpec([None, 2]), tf.TensorSpec([None, 3], tf.int64)],
        "dense": tf.TensorSpec([4]),
        "half": tf.TensorSpec([None], tf.float16),
    }
    arrays = {
        "rows": [np.ones((3, 2), np.float32), np.arange(15).reshape(5, 3)],
        "dense": np.arange(4, dtype=np.float32),
        "half": np.ones(0, np.float16),
    }
    packing = Packing(specs)
    lengths = [len(array) for array in leaves_of(arrays) if array is not arrays["dense"]]
    pack, unpack = packing.pack, packing.unpack
    if way == "call":
        pack, unpack = packing.pack_by_call, packing.unpack_by_call
    unpack = unpack if way == "eager" else tf.function(unpack)
    back = unpack(pack(tf.nest.map_structure(tf.constant, arrays)), lengths)
    assert_same(back, arrays)
    assert packing.num_bytes == 16


def test_what_is_absent_takes_no_room_and_comes_back_absent():
    packing = Packing(Pair(None, [None, tf.TensorSpec([2])]))
    (flat,) = packing.pack(Pair(None, [None, tf.constant([1.0, 2.0])]))
    assert flat.shape == [2]
    back = packing.unpack([flat])
    assert isinstance(back, Pair)
    assert back.first is None
    assert back.second[0] is None
    np.testing.assert_array_equal(back.second[1], [1.0, 2.0])


@pytest.mark.parametrize(
    "record",
    [
        Pair([tf.constant(1.0)], [tf.constant(1.0)]),
        Pair(tf.constant(1.0), [tf.constant(1.0), tf.constant(1.0)]),
        Pair(tf.constant(1.0), [None]),
    ],
    ids=["nested", "longer", "absent"],
)
def test_a_record_of_another_structure_is_refused(record):
    packing = Packing(Pair(tf.TensorSpec([]), [tf.TensorSpec([])]))
    for pack in (packing.pack, packing.pack_by_call):
        with pytest.raises(ValueError, match=r"structure|Expected"):
            pack(record)
