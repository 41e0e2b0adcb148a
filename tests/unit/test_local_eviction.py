"""Tables in one process that give up rows for new ids."""

from __future__ import annotations

import datetime

import keras
import numpy as np
import pytest

from kerasps.layers import CountAdmission, Eviction
from support.admission import BATCH_SIZE, make_model, stream, train

MAX_ROWS = 60


def ids_of(table):
    return np.sort(np.concatenate([ids for ids, _ in table.items()]))


def made(**options):
    model, (table,) = make_model(max_rows=MAX_ROWS, **options)
    return model, table


@pytest.mark.parametrize("order", ["lru", "age"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_full_table_replaces_the_first_rows_in_order(order, eager):
    model, table = made(eviction=Eviction(order), optimizer=keras.optimizers.SGD(0.1))
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
    ids = np.arange(1600).reshape(-1, 2)
    # Eager calls do not say which of them are of one step, so rows stay for some calls.
    train(model, [ids])
    kept = ids_of(table)
    assert len(kept) == MAX_ROWS
    gone = table.evicted()
    assert gone.is_complete
    figures = table.figures()
    assert figures["evicted"] == len(gone.ids) == figures["inserted"] - MAX_ROWS
    assert set(kept).isdisjoint(gone.ids)
    if eager:
        assert figures["refused_for_room"] > 0
    else:
        assert set(kept) | set(gone.ids) == set(ids.ravel())
        # Rows of one step are alike in order.
        assert kept.min() >= 1600 - MAX_ROWS - 2 * BATCH_SIZE
        assert figures["refused_for_room"] == 0


def test_a_row_that_takes_the_place_of_another_has_its_own_value_and_slots():
    adagrad = keras.optimizers.Adagrad(0.5)
    model, table = made(eviction=Eviction("lru"), optimizer=adagrad)
    bounded = np.arange(960).reshape(-1, 2)
    train(model, [bounded])
    kept = ids_of(table)
    plain, (unbounded,) = make_model(max_rows=1000, optimizer=keras.optimizers.Adagrad(0.5))
    train(plain, [bounded])
    np.testing.assert_array_equal(table.rows(kept), unbounded.rows(kept))
    slots = [
        next(v for v in each.optimizer.variables if hasattr(v, "find_rows"))
        for each in (model, plain)
    ]
    np.testing.assert_array_equal(*(slot.find_rows(kept) for slot in slots))


def test_rows_expire_and_begin_anew():
    model, table = made(eviction=Eviction(ttl_steps=2), optimizer=keras.optimizers.SGD(0.1))
    first = table.rows([5])
    old, other = np.arange(32).reshape(-1, 2), np.arange(100, 124).reshape(-1, 2)
    train(model, [old])
    after = table.rows([5])
    assert (after != first).all()
    for _ in range(3):
        model.train_on_batch(other[:8], np.ones((8, 1)))
    model.train_on_batch(np.array([[5, 5]]), np.ones((1, 1)))
    assert table.evicted().ids.tolist() == [5]
    # A row gets one update, from its first value.
    assert (table.rows([5]) != first).all()
    model.train_on_batch(np.array([[6, 6]]), np.zeros((1, 1)))
    assert sorted(table.evicted().ids) == [5, 6]


def test_rows_are_removed_by_their_age():
    model, table = made(eviction=Eviction("lru", ttl_seconds=1000))
    train(model, [np.arange(64).reshape(-1, 2)[:16]])
    train(model, [np.arange(100, 132).reshape(-1, 2)[:8]])
    mark = table.evicted().mark
    assert table.evict_where(older_than=datetime.timedelta(hours=1)) == 0
    assert table.evict_where(older_than=0) == 32
    assert sorted(table.evicted(since=mark).ids) == list(range(32))
    assert table.num_rows == 16


def test_the_use_of_rows_is_in_files(tmp_path):
    model, table = made(eviction=Eviction("lfu"))
    train(model, [stream(0)])
    kept = ids_of(table)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    (there,) = [layer for layer in loaded.layers if hasattr(layer, "eviction")]
    np.testing.assert_array_equal(there._usage.find_rows(kept), table._usage.find_rows(kept))
    # Steps go on from there: a new id replaces none of the rows of its own step.
    new = np.arange(1000, 1000 + 2 * BATCH_SIZE).reshape(-1, 2)
    train(loaded, [new])
    assert set(new.ravel()) <= set(ids_of(there))
    np.testing.assert_array_equal(there._usage.find_rows(new[0])[:, 0], [21, 21])


def test_admission_and_eviction_go_together():
    model, (table,) = make_model([CountAdmission(2)], max_rows=MAX_ROWS, eviction=Eviction("lru"))
    ids = np.repeat(np.arange(416).reshape(-1, 1, 2 * BATCH_SIZE), 2, axis=1).reshape(-1, 2)
    train(model, [ids])
    figures = table.figures()
    assert figures["rows"] == MAX_ROWS
    assert figures["inserted"] == 416
