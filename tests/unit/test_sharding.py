"""Which row is in which shard, and the storage that is made of shards."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from kerasps.variables.rows.sharding import LAYOUTS, InBlocks

SHARDINGS = [
    LAYOUTS[layout](num_rows, num_shards)
    for layout in ("mod", "div")
    for num_rows, num_shards in [(1, 1), (7, 1), (7, 2), (7, 7), (9, 3), (100, 8)]
]


def name_of(sharding):
    return f"{type(sharding).__name__}-{sharding.num_rows}-{sharding.num_shards}"


@pytest.fixture(params=SHARDINGS, ids=name_of)
def sharding(request):
    return request.param


def test_every_row_is_in_one_shard_and_shards_differ_by_one_row_at_most(sharding):
    shards = [sharding.rows(shard) for shard in range(sharding.num_shards)]
    assert sorted(row for rows in shards for row in rows) == list(range(sharding.num_rows))
    sizes = [len(rows) for rows in shards]
    assert max(sizes) - min(sizes) <= 1


def test_a_row_is_found_where_it_lies(sharding):
    shard, place = sharding.locate(tf.range(sharding.num_rows))
    for row, (index, position) in enumerate(zip(shard.numpy(), place.numpy(), strict=True)):
        assert sharding.rows(index)[position] == row


def test_neighbouring_rows_are_neighbours_in_each_shard(sharding):
    for start in range(sharding.num_rows + 1):
        for stop in {start, min(start + 3, sharding.num_rows), sharding.num_rows}:
            for shard in range(sharding.num_shards):
                wanted = [
                    place for place, row in enumerate(sharding.rows(shard)) if start <= row < stop
                ]
                assert list(sharding.places(shard, range(start, stop))) == wanted


def test_the_parts_join_to_the_whole(sharding):
    value = np.arange(sharding.num_rows * 3).reshape(-1, 3)
    parts = [tf.constant(sharding.rows_in(value, shard)) for shard in range(sharding.num_shards)]
    np.testing.assert_array_equal(sharding.join(parts), value)


def test_div_is_tensorflows_own_division():
    # What `tf.distribute` calls a partition: the first shards have the rows that are left over.
    assert [len(InBlocks(10, 3).rows(shard)) for shard in range(3)] == [4, 3, 3]


def test_ids_of_64_bits_are_not_cut():
    shard, place = InBlocks(2**40, 2).locate(tf.constant([2**39 + 5], tf.int64))
    assert (int(shard[0]), int(place[0])) == (1, 5)
