"""Which rows a step asks for, and in which round, found on a graph made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from kerasps.step.lookups import MustReadWhole, RowRequest, plan_rounds, request_args
from kerasps.variables import shards_in
from support.local_variables import compute_graph, inventory_of, local_variable

BATCH = tf.TensorSpec([None], tf.int64)


def table(rows=10, num_shards=1, layout="mod", name="table"):
    values = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    return local_variable(values, num_shards, layout, name=name)


def plan(tables, ids, pulled=()):
    inventory = inventory_of(pulled, tables)
    function, names, lookups = compute_graph(inventory, BATCH, ids)
    return plan_rounds(function, [names], lookups, list(inventory.pulled)), names


def next_ids(rows):
    """Return ids that follow from rows of a table."""
    return tf.cast(rows[:, 0], tf.int64) % 10


def tables_of(rounds):
    return [[table.name for table in own.tables] for own in rounds]


def test_ids_of_the_batch_are_asked_for_in_the_first_round():
    users, items = table(name="users"), table(name="items")
    rounds, _ = plan([users, items], lambda inputs: [[inputs.batch % 3], [inputs.batch + 1]])
    assert tables_of(rounds) == [["users", "items"]]


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


def test_ids_that_follow_from_a_dense_variable_wait_for_the_first_round_trip():
    offset = local_variable(np.float32(1.0), name="offset")
    rounds, _ = plan(
        [table()],
        lambda inputs: [[inputs.batch + tf.cast(inputs.pulled[0], tf.int64)]],
        pulled=[offset],
    )
    assert tables_of(rounds) == [[], ["table"]]


def test_without_tables_there_is_one_round_that_asks_for_none():
    rounds, _ = plan([], lambda inputs: [])
    assert tables_of(rounds) == [[]]
    assert len(rounds[0].requests({}, {})) == 0


def test_a_table_whose_ids_follow_from_its_own_rows_is_read_whole():
    users, chain = table(name="users"), table(name="chain")
    answer, _ = plan(
        [users, chain],
        lambda inputs: [[inputs.batch], [next_ids(inputs.tables[1].rows)]],
    )
    assert isinstance(answer, MustReadWhole)
    assert list(answer.reasons) == [chain]
    assert answer.reasons[chain] == "its ids follow from rows of its own"


def test_a_table_whose_ids_are_drawn_at_random_is_read_whole():
    users, random = table(name="users"), table(name="random")

    def ids(inputs):
        drawn = tf.random.uniform(tf.shape(inputs.batch), maxval=10, dtype=tf.int64)
        return [[inputs.batch], [drawn]]

    answer, _ = plan([users, random], ids)
    assert isinstance(answer, MustReadWhole)
    assert list(answer.reasons) == [random]
    assert "drawn at random by RandomUniformInt" in answer.reasons[random]


@pytest.mark.parametrize("layout", ["mod", "div"])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32"])
def test_a_request_asks_for_each_row_once_and_every_look_up_finds_its_rows(
    num_shards, layout, dtype
):
    own = table(rows=11, num_shards=num_shards, layout=layout)
    whole = np.arange(22, dtype=np.float32).reshape(11, 2)
    generator = np.random.default_rng(0)
    lookups = [generator.integers(0, 11, shape).astype(dtype) for shape in [(7,), (2, 3), (0,)]]
    request = RowRequest(own, *request_args(own, [tf.constant(ids) for ids in lookups]))
    rows = []
    for shard in shards_in([own]):
        places = request.ids_in(shard).numpy()
        assert len(set(places)) == len(places) == request.count_in(shard)
        rows.append(shard.storage.numpy()[places])
    rows = np.concatenate(rows)
    assert (
        len(rows)
        == request.num_rows
        == len(np.unique(np.concatenate([i.ravel() for i in lookups])))
    )
    for ids, positions in zip(lookups, request.positions, strict=True):
        np.testing.assert_array_equal(rows[positions.numpy()], whole[ids.ravel()])


@pytest.mark.parametrize("layout", ["mod", "div"])
def test_gradients_go_to_the_shard_whose_rows_they_are_of(layout):
    own = table(rows=9, num_shards=3, layout=layout)
    request = RowRequest(own, *request_args(own, [tf.constant([8, 0, 3, 3, 5])]))
    shards = shards_in([own])
    rows = tf.concat([tf.gather(s.storage, request.ids_in(s)) for s in shards], 0)
    for shard in shards:
        expected = shard.storage.numpy()[request.ids_in(shard).numpy()]
        np.testing.assert_array_equal(request.rows_of(shard, rows), expected)


@pytest.mark.parametrize("bad", [10, -1, 2**40])
def test_an_id_out_of_range_is_named(bad):
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"'.*table' has 10 rows[^$]*{bad}"):
        request_args(table(), [tf.constant([3, bad], tf.int64)])


def test_a_round_finds_the_ids_that_the_step_will_look_up():
    users, friends = table(name="users"), table(name="friends")
    rounds, names = plan(
        [users, friends],
        lambda inputs: [[inputs.batch * 2 + 1], [next_ids(inputs.tables[0].rows)]],
    )
    batch = tf.constant([1, 0, 1], tf.int64)
    known = {names.batch[0]: batch}
    requests = rounds[0].requests({}, known)
    (users_shard,) = shards_in([users])
    np.testing.assert_array_equal(requests[users].ids_in(users_shard), [3, 1])
    known[names.tables[users][0]] = tf.constant([[6.0, 7.0], [2.0, 3.0]])
    (request,) = rounds[1].requests({}, known).values()
    (friends_shard,) = shards_in([friends])
    np.testing.assert_array_equal(request.ids_in(friends_shard), [6, 2])
