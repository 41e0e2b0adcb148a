"""Which rows a step asks for, and in which round, found on a graph made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.runtime.errors import translated_errors
from kerasps.step.rows.groups import TableGroup, grouping
from kerasps.step.rows.lookups import MustReadWhole, plan_rounds
from kerasps.step.rows.row_requests import LookupIds, RowRequest, ask
from support.local_variables import compute_graph, inventory_of, local_variable

BATCH = tf.TensorSpec([None], tf.int64)


def table(rows=10, num_shards=1, layout="mod", name="table"):
    values = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    return local_variable(values, num_shards, layout, name=name)


def plan(tables, ids, pulled=()):
    inventory = inventory_of(pulled, tables)
    function, names, lookups = compute_graph(inventory, BATCH, ids)
    divide = grouping([], "lazy")
    return plan_rounds(function, [names], lookups, list(inventory.pulled), divide), names


def look_ups(ids, *, from_end=False):
    return [[LookupIds(tf.constant(i), from_end) for i in table_ids] for table_ids in ids]


def next_ids(rows):
    """Return ids that follow from rows of a table."""
    return tf.cast(rows[:, 0], tf.int64) % 10


def tables_of(rounds):
    return [[table.name for table in of_round.tables] for of_round in rounds]


def test_ids_that_follow_from_rows_of_another_table_are_found_a_round_later():
    tables = [table(name=name) for name in ("friends", "users", "items", "friends_of_friends")]

    def ids(inputs):
        friends, users, _, _ = inputs.tables
        return [
            [next_ids(users.rows)],
            [inputs.batch],
            [inputs.batch + 1],
            [next_ids(friends.rows)],
        ]

    rounds, _ = plan(tables, ids)
    assert tables_of(rounds) == [["users", "items"], ["friends"], ["friends_of_friends"]]


def test_a_table_whose_ids_follow_from_its_own_rows_is_read_whole():
    users, chain = table(name="users"), table(name="chain")
    answer, _ = plan(
        [users, chain],
        lambda inputs: [[inputs.batch], [next_ids(inputs.tables[1].rows)]],
    )
    assert isinstance(answer, MustReadWhole)
    assert list(answer.reasons) == [chain]
    assert answer.reasons[chain] == "its ids depend on rows of the same table"


def group_of(heights, num_shards, layout):
    return TableGroup.of(
        [table(rows, num_shards if rows >= num_shards else 1, layout, name=f"table_{number}")]
        for number, rows in enumerate(heights)
    )


def pulled(request):
    """Return the rows of all tables of a request, as the ps hand them out."""
    parts = []
    for shard in request.group.shards:
        ids = np.split(request.ids_in(shard), np.cumsum(request.counts_in(shard))[:-1])
        assert all(len(set(places)) == len(places) for places in ids)  # each once
        parts.append(
            np.concatenate(
                [
                    part.storage.numpy()[places]
                    for part, places in zip(shard.shards, ids, strict=True)
                ]
            )
        )
    return request.join([tf.constant(part) for part in parts])


@pytest.mark.parametrize("layout", ["mod", "div"])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("heights", [(11,), (11, 4), (5, 11, 3, 7)])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "int8", "uint8"])
def test_a_request_asks_for_each_row_once_and_every_look_up_finds_its_rows(
    num_shards, layout, heights, dtype
):
    group = group_of(heights, num_shards, layout)
    generator = np.random.default_rng(0)
    # Another number of look-ups of each table; the last table is asked for nothing.
    shapes = [[(7,), (2, 3), (0,)], [(9,)], [(1,), (2,)], [(0,)]]
    ids = [
        [generator.integers(0, rows, shape).astype(dtype) for shape in table_shapes]
        for rows, table_shapes in zip(heights, shapes, strict=False)
    ]

    def look_up(number, i, rows):
        """Count every other id from the end in every other look-up."""
        if number % 2 and np.issubdtype(dtype, np.signedinteger):
            i = i - rows * (i % 2)
        return LookupIds(tf.constant(i), from_end=bool(number % 2))

    wanted = [
        [look_up(number, i, rows) for number, i in enumerate(table_ids)]
        for rows, table_ids in zip(heights, ids, strict=True)
    ]
    request = RowRequest(group, ask(group, wanted))
    joined = pulled(request)
    of_tables = zip(group.tables, request.split(joined), request.find(joined), ids, strict=True)
    for table, rows, found, lookups in of_tables:
        whole = table.storage.numpy()
        num_different = len(np.unique(np.concatenate([i.ravel() for i in lookups])))
        assert len(rows) == request.num_rows(table) == num_different
        for i, positions, values in zip(lookups, request.positions(table), found, strict=True):
            np.testing.assert_array_equal(rows.numpy()[positions.numpy()], whole[i.ravel()])
            np.testing.assert_array_equal(values, whole[i.ravel()])


@pytest.mark.parametrize("heights", [(10,), (10, 4)])
@pytest.mark.parametrize(
    ("bad", "from_end"), [(10, False), (-1, False), (2**40, False), (10, True), (-11, True)]
)
def test_an_id_out_of_range_is_named(bad, from_end, heights):
    group = group_of(heights, 1, "mod")
    ids = [[tf.constant([3, bad], tf.int64)], [tf.constant([3], tf.int64)]][: len(heights)]
    message = f"'.*table_0' has 10 rows.*Received: id {bad}\\."
    with pytest.raises(kerasps.InputError, match=message), translated_errors(None):
        tf.function(lambda: ask(group, look_ups(ids, from_end=from_end)), autograph=False)()


def test_an_id_that_is_a_row_of_another_table_of_the_group_is_out_of_range():
    group = group_of((10, 4, 10), 1, "mod")
    ids = [[tf.constant([9])], [tf.constant([3]), tf.constant([1, 4])], [tf.constant([9])]]
    message = r"'.*table_1' has 4 rows.*Received: id 4\."
    with pytest.raises(kerasps.InputError, match=message), translated_errors(None):
        tf.function(lambda: ask(group, look_ups(ids)), autograph=False)()


def test_a_row_space_of_more_rows_than_32_bits_count():
    class Huge:
        sharding, has_whole_value = None, True
        shape = (2**31 - 1, 2)
        shards = (SimpleNamespace(device=""),)

    group = TableGroup.of([[Huge()], [Huge()]])
    last = 2**31 - 2
    request = ask(group, look_ups([[[last, 5]], [[-1, 7, last]]], from_end=True))
    np.testing.assert_array_equal(request.ids[0], [last, 5, last, 7])
    np.testing.assert_array_equal(request.positions[1][0], [0, 1, 0])
