"""Many tensors in few, and back, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from kerasps.step.records.packing import Packing

DTYPES = ["float32", "int64", "int32", "uint32", "bool", "float16", "bfloat16", "float64"]
SHAPES = [(3, 2), (), (5,), (0, 4), (1, 1, 2)]


def random_bits(dtype, shape, seed=0):
    """An array of any bit patterns: NaN payloads, infinities and denormal numbers among them."""
    generator = np.random.default_rng(seed)
    if dtype == "bool":
        return generator.random(shape) < 0.5
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    size = int(np.prod(shape))
    return np.frombuffer(
        generator.bytes(size * np.dtype(numpy_dtype).itemsize), numpy_dtype
    ).reshape(shape)


def bits(value):
    array = np.ascontiguousarray(value)
    return array.shape, array.dtype, array.tobytes()


def round_trip(arrays, *, in_graph=False, by_call=False, on_coordinator=False):
    """Packs and unpacks; returns the flat tensors between, and what came back."""
    tensors = [tf.constant(array) for array in arrays]
    packing = Packing([tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors])
    ways = packing.pack, packing.unpack
    if by_call:
        ways = packing.pack_by_call, packing.unpack_by_call
    pack, unpack = (tf.function(f) if in_graph or by_call else f for f in ways)
    flats = pack(tensors)
    assert [tf.TensorSpec(flat.shape, flat.dtype) for flat in flats] == packing.carrier_specs
    if on_coordinator:
        return flats, packing.unpack_numpy([flat.numpy() for flat in flats])
    return flats, [tensor.numpy() for tensor in unpack(flats)]


@pytest.mark.parametrize(
    "way",
    [{}, {"in_graph": True}, {"by_call": True}, {"on_coordinator": True}],
    ids=["eager", "graph", "call", "coordinator"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_each_dtype_survives(dtype, way):
    arrays = [random_bits(dtype, shape, seed) for seed, shape in enumerate(SHAPES)]
    flats, back = round_trip(arrays, **way)
    assert len(flats) == 1
    assert [bits(array) for array in back] == [bits(array) for array in arrays]


@pytest.mark.parametrize("alone", [True, False])
def test_nan_payloads_and_the_integers_that_look_like_them_survive(alone):
    quiet_and_signalling = np.array(
        [0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0xFF812345, 0x00000001, 0x80000000], np.uint32
    )
    arrays = [
        quiet_and_signalling.view(np.float32),
        quiet_and_signalling.view(np.int32),
        np.array([2**63 - 1, -(2**63), -1, 0x7F8000017FC00001], np.int64),
        np.array([0x7FF0000000000001, 0x7FF8000000ABCDEF], np.uint64).view(np.float64),
    ]
    for group in [[array] for array in arrays] if alone else [arrays]:
        for way in ({}, {"in_graph": True}, {"on_coordinator": True}):
            _, back = round_trip(group, **way)
            assert [bits(array) for array in back] == [bits(array) for array in group]


def test_a_float32_model_with_its_integer_counters_travels_as_one_tensor():
    arrays = [
        np.ones((4, 3), np.float32),
        np.int64(2**40 + 7),
        np.zeros(3, np.float32),
        np.int32(-5),
    ]
    (flat,), back = round_trip(arrays)
    assert (flat.dtype, flat.shape) == (tf.float32, [12 + 2 + 3 + 1])
    assert [bits(array) for array in back] == [bits(array) for array in arrays]


def test_a_tensor_of_another_dtype_is_cast_to_that_of_its_spec():
    packing = Packing([tf.TensorSpec([2], tf.float32)])
    (back,) = packing.unpack(packing.pack([tf.constant([1, 2], tf.int64)]))
    np.testing.assert_array_equal(back, np.array([1.0, 2.0], np.float32), strict=True)
