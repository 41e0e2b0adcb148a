"""Storages that are read and written a piece at a time, and arrays in files that are."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import tensorflow as tf

from kerasps.variables.rows import chunks as pieces_module
from kerasps.variables.rows.chunks import StoredRows, chunks_of, read_rows, write_rows
from kerasps.variables.rows.sharding import LAYOUTS, ShardedStorage

VALUE = np.arange(23 * 4, dtype="float32").reshape(23, 4)


def storage_of(value, num_shards, layout):
    sharding = LAYOUTS[layout](len(value), num_shards)
    shards = [tf.Variable(sharding.rows_in(value, shard)) for shard in range(num_shards)]
    return ShardedStorage(shards, sharding, "table")


def storages():
    for layout in ("mod", "div"):
        for num_shards in (1, 2, 5, 23):
            yield pytest.param(
                lambda n=num_shards, kind=layout: storage_of(VALUE, n, kind),
                id=f"{layout}-{num_shards}",
            )
    yield pytest.param(lambda: tf.Variable(VALUE), id="whole")


@pytest.fixture(params=storages())
def storage(request):
    return request.param()


@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 20])
def test_pieces_are_all_rows_in_order_and_no_larger_than_asked(storage, piece_bytes, monkeypatch):
    monkeypatch.setattr(pieces_module, "CHUNK_BYTES", piece_bytes)
    ranges = chunks_of(storage)
    assert [row for rows in ranges for row in rows] == list(range(23))
    assert all(len(rows) * 16 <= max(piece_bytes, 16) for rows in ranges)
    assert all(len(rows) for rows in ranges)


@pytest.mark.parametrize("rows", [range(0, 23), range(0, 1), range(22, 23), range(4, 17)], ids=str)
def test_rows_are_read_in_the_order_of_the_whole(storage, rows):
    np.testing.assert_array_equal(read_rows(storage, rows, None), VALUE[rows.start : rows.stop])


@pytest.mark.parametrize("rows", [range(0, 23), range(0, 1), range(22, 23), range(4, 17)], ids=str)
def test_rows_are_written_and_others_are_not(storage, rows):
    expected = VALUE.copy()
    expected[rows.start : rows.stop] = -VALUE[rows.start : rows.stop]
    write_rows(storage, rows, tf.constant(-VALUE[rows.start : rows.stop]), None)
    np.testing.assert_array_equal(storage.numpy(), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool", "float16", "bfloat16"])
def test_an_array_in_a_file_is_read_by_slices_or_whole(tmp_path, dtype):
    dtype = tf.as_dtype(dtype).as_numpy_dtype
    value = (VALUE % 2).astype(dtype)
    with h5py.File(tmp_path / "file.h5", "w") as file:
        stored = StoredRows(file.create_dataset("entry", data=value), dtype)
        assert (stored.shape, stored.dtype, len(stored)) == ((23, 4), np.dtype(dtype), 23)
        np.testing.assert_array_equal(stored[3:7], value[3:7])
        np.testing.assert_array_equal(np.asarray(stored), value)
        assert tf.convert_to_tensor(stored).dtype == tf.as_dtype(dtype)
