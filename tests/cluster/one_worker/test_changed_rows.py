"""A reader of the rows that changed has those of the table, bit for bit."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from kerasps.dynamic.policies import stamps
from kerasps.errors import InputError
from kerasps.layers import CountAdmission, DynamicEmbedding, Eviction
from support.admission import BATCH_SIZE, make_model, train
from support.row_readers import Reader


def made(strategy, num_tables=1, **options):
    with strategy.scope():
        return make_model([options.pop("admission", None)] * num_tables, **options)


def stream(seed, num_steps=12, first=0):
    return first + np.random.default_rng(seed).zipf(1.3, (num_steps * BATCH_SIZE, 2)) % 400


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_reader_of_two_tables_in_a_pool_has_their_rows(strategy, optimizer):
    model, tables = made(strategy, 2, optimizer=OPTIMIZERS[optimizer]())
    train(model, [stream(0), stream(1)])
    readers = [Reader(table).read() for table in tables]
    for number in range(2, 6):
        train(model, [stream(number, 3), stream(number + 10, 3, first=100)])
        for reader, table in zip(readers, tables, strict=True):
            reader.read().assert_equals()
            assert reader.changed < table.num_rows
    assert [reader.wholes for reader in readers] == [1, 1]
    # Who begins later, or asks less often, has the same.
    Reader(tables[0]).read().assert_equals()
    for reader in readers:
        assert reader.read().changed == 0


def test_rows_by_hand_are_changes(strategy):
    model, (table,) = made(strategy)
    train(model, [stream(0)])
    reader = Reader(table).read()
    table.load_rows([3, 10**9], np.ones([2, 4], "float32"))
    assert reader.read().changed == 2
    reader.assert_equals()
    assert table.evict([3, 10**9, 77777]) == 2
    changes = table.changed_since(reader.version)
    np.testing.assert_array_equal(changes.removed, [3, 10**9])
    reader.read().assert_equals()
    # A removed id that comes again before the question has a row.
    table.evict([4, 5])
    table.load_rows([4], np.zeros([1, 4], "float32"))
    changes = table.changed_since(reader.version)
    np.testing.assert_array_equal(changes.removed, [5])
    reader.read().assert_equals()
    # All rows are replaced.
    model.set_weights(model.get_weights())
    reader.read().assert_equals()
    table.embeddings.replace_rows(np.arange(5), np.ones([5, 4], "float32"))
    reader.read().assert_equals()
    assert reader.wholes == 1


@pytest.mark.parametrize("order", ["lru", "norm"])
def test_rows_that_are_given_up_are_changes(strategy, order):
    eviction = Eviction(order, low=0.8, ttl_steps=30)
    model, tables = made(strategy, 2, eviction=eviction, max_rows=150)
    readers, late = [Reader(table).read() for table in tables], Reader(tables[0])
    for number in range(6):
        of_steps = np.arange(4 * BATCH_SIZE)[:, None] + 200 * number
        train(model, [of_steps + stream(number, 4) % 50, of_steps + stream(number, 4) % 90])
        for reader in readers:
            reader.read().assert_equals()
        if number % 3 == 1:
            late.read().assert_equals()
    assert tables[0].figures()["evicted"] > 100
    assert [reader.wholes for reader in [*readers, late]] == [1, 1, 1]
    assert tables[0].evict_where(older_than=1) > 0
    readers[0].read().assert_equals()


def test_counts_of_candidates_are_changes(strategy):
    admission = CountAdmission(3, max_candidates=64)
    model, (table,) = made(strategy, admission=admission)
    table_of_counts = table._candidates
    changes = table_of_counts.access.changes
    version, known = None, {}
    for number in range(4):
        train(model, [stream(number, 6)])
        answer = changes.since(version, 1000)
        assert answer.is_whole == (version is None)
        for key in answer.removed.tolist():
            known.pop(key, None)
        for ids, rows in answer.pieces:
            known.update(zip(ids.tolist(), rows[:, 0].tolist(), strict=True))
        version = answer.version
        ids = table_of_counts.sorted_ids()
        counts = table_of_counts.find_rows(ids)[:, 0]
        assert known == dict(zip(ids.tolist(), counts.tolist(), strict=True))


def test_a_reader_that_is_too_old_gets_all_rows(strategy, monkeypatch):
    monkeypatch.setattr(stamps, "MOST_REMOVED", 16)
    monkeypatch.setattr("kerasps.dynamic.parts.key_part.MOST_REMOVED", 16)
    monkeypatch.setattr("kerasps.dynamic.tables.changed.MOST_REMOVED", 16)
    with strategy.scope():
        # A width that no other test has, so that its pool is new.
        table = DynamicEmbedding(23)
        table.build((None, 1))
    table.load_rows(np.arange(200), np.ones([200, 23], "float32"))
    reader, late = Reader(table).read(), Reader(table).read()
    for first in range(0, 60, 6):
        table.evict(np.arange(first, first + 6))
        reader.read().assert_equals()
    late.read().assert_equals()
    assert (reader.wholes, late.wholes) == (1, 2)


def test_versions_of_others_are_not_known(strategy):
    model, tables = made(strategy, 2)
    train(model, [stream(0), stream(1)])
    version = tables[0].changed_since().version
    assert not tables[0].changed_since(version).is_whole
    assert tables[1].changed_since(version).is_whole
    later = [version[0], *(number + 10**6 for number in version[1:])]
    for unknown in ((), version[:4], version[:1], later, [0] * len(version)):
        changes = tables[0].changed_since(unknown)
        assert changes.is_whole
        assert sum(len(ids) for ids, _ in changes.pieces) == tables[0].num_rows


@pytest.mark.parametrize("version", [3, "version", [None], [[1, 2], 3]])
def test_what_is_no_version_is_refused(strategy, version):
    _, (table,) = made(strategy)
    with pytest.raises(InputError, match="Argument `version` of `changed_since`"):
        table.changed_since(version)


@pytest.mark.parametrize("options", [{}, {"max_rows": 500}])
def test_without_a_strategy(options):
    model, tables = make_model([None] * 2, optimizer=keras.optimizers.Adam(0.1), **options)
    train(model, [stream(0), stream(1)])
    readers, late = [Reader(table).read() for table in tables], Reader(tables[0]).read()
    for number in range(2, 5):
        train(model, [stream(number, 3), stream(number + 10, 3)])
        for reader in readers:
            reader.read().assert_equals()
    tables[0].evict([1, 2, 3])
    readers[0].read().assert_equals()
    tables[0].load_rows([2], np.ones([1, 4], "float32"))
    assert readers[0].read().changed == 1
    readers[0].assert_equals()
    late.read().assert_equals()
    assert late.wholes == readers[0].wholes == 1
    assert tables[1].changed_since(late.version).is_whole
    assert tables[0].changed_since((0, 1)).is_whole
