"""Eviction: tables without a vocabulary that give up rows for new ids."""

from __future__ import annotations

import contextlib
import datetime

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.dynamic.policies.terms import Field
from kerasps.layers import CountAdmission, Eviction, rows_in_file
from support.admission import BATCH_SIZE, make_model, train
from support.eviction import ModelOfTable

NUM_STEPS = 60
MAX_ROWS = 400
LOW = 0.8


def made(strategy, num_tables=1, admission=None, **options):
    options = {"max_rows": MAX_ROWS, **options}
    with strategy.scope():
        return make_model([admission] * num_tables, **options)


def moving(seed, num_steps=NUM_STEPS):
    """Returns a stream in which ids appear and fade."""
    shape = (num_steps * BATCH_SIZE, 2)
    late = np.arange(shape[0])[:, None]
    return late + np.random.default_rng(seed).zipf(1.5, shape) % 300


def ids_of(table):
    return np.sort(np.concatenate([ids for ids, _ in table.items()]))


def uses(ids):
    """Returns the step in which each id came last, from 1, and how many steps had it."""
    last, counts = {}, {}
    for step in range(len(ids) // BATCH_SIZE):
        for key in np.unique(ids[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]):
            last[key], counts[key] = step + 1, counts.get(key, 0) + 1
    return last, counts


@pytest.mark.parametrize("order", ["lru", "lfu", "age"])
def test_a_table_stays_within_its_bound_and_keeps_the_last_in_order(strategy, order, caplog):
    streams = [moving(0), moving(1)]
    model, tables = made(strategy, 2, eviction=Eviction(order, low=LOW), steps_per_execution=4)
    train(model, streams)
    for table, stream in zip(tables, streams, strict=True):
        figures, kept = table.figures(), ids_of(table)
        # On each ps, rows go from halfway between `low` and the bound.
        assert len(kept) == figures["rows"] <= (1 + LOW) / 2 * MAX_ROWS
        assert figures["evicted"] > 500
        assert figures["refused_for_room"] == 0
        # A row of 4, its slot, and its use.
        assert table.embeddings.row_bytes == 4 * 4 + 4 * 4 + (4 if order == "lru" else 8)
        # What a status divides by time: with rows that took the place of others.
        known = table.embeddings.storage.table.known_fields.values()
        made_rows = [fields[Field.MADE] for fields in known]
        assert sum(made_rows) == figures["rows"] + figures["evicted"]
        last, _ = uses(stream)
        usage = table._usage.access.read(kept)
        if order == "lru":
            # The step of the last use, whatever became of others.
            np.testing.assert_array_equal(usage[:, 0], [last[key] for key in kept])
        # The rows of the last step are never given up.
        assert set(stream[-BATCH_SIZE:].ravel()) <= set(kept)
        mean = {"lru": 0.75, "age": 0.75, "lfu": 0.5}[order]
        assert np.mean([last[key] for key in kept]) > mean * NUM_STEPS
    assert "nearly full" not in caplog.text  # that is how it stays


@pytest.mark.parametrize(
    "eviction",
    [
        *(Eviction(order, low=0.8) for order in ("lru", "lfu", "age", "norm")),
        Eviction(ttl_steps=4, min_rows=60),
        Eviction("lfu", ttl_steps=6, low=0.5),
    ],
    ids=repr,
)
def test_rows_are_those_of_a_numpy_model(strategy, eviction):
    sgd = keras.optimizers.SGD(0.5, momentum=0.5)
    model, (table,) = made(strategy, eviction=eviction, max_rows=150, optimizer=sgd)
    expected = ModelOfTable(table, len(table.embeddings.shards))
    steps, told, mark = moving(3, 40).reshape(40, BATCH_SIZE, 2), [], None
    for number, ids in enumerate(steps):
        expected.push(ids)
        model.train_on_batch(ids, np.ones((BATCH_SIZE, 1)))
        if number % 10 == 9:
            gone = table.evicted(since=mark)
            assert gone.is_complete
            mark = gone.mark
            told += gone.ids.tolist()
    expected.assert_equals()
    assert sorted(told) == expected.gone
    figures = table.figures()
    assert figures["pushed_ids"] == sum(len(np.unique(ids)) for ids in steps)
    assert figures["resurrected"] == 0


def test_victims_are_among_the_oldest(strategy):
    """One step after another: rank of each victim by the last use, among all rows before."""
    model, (table,) = made(strategy, eviction=Eviction("lru", low=0.5), max_rows=8000)
    num_ps = len(table.embeddings.shards)
    old = np.arange(3900, dtype=np.int64).reshape(-1, 2)
    train(model, [old])
    before = ids_of(table)
    # One step of eight gives up what is above half of the bound: 4000 rows, over all ps.
    for step in range(8):
        new = np.arange(10_000 + 50 * step, 10_050 + 50 * step).reshape(-1, 2)
        model.train_on_batch(new, np.ones((25, 1)))
    victims = np.setdiff1d(before, ids_of(table))
    assert abs(len(victims) - 200) <= 64 * num_ps
    # They came in the order of their numbers, 32 in each step. A ps gives up 100 of 2100 at once,
    # each as the first among 21.
    assert np.mean(victims) / 3900 < 0.08


def test_an_id_that_comes_again_begins_anew(strategy):
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model, (table,) = made(strategy, eviction=Eviction("lru"), max_rows=100, optimizer=sgd)
    first = table.rows([5])
    model.train_on_batch(np.array([[5, 5]]), np.ones((1, 1)))
    assert (table.rows([5]) != first).all()
    train(model, [np.arange(1000, 1640).reshape(-1, 2)])
    assert 5 not in ids_of(table)
    np.testing.assert_array_equal(table.rows([5]), first)
    (slot,) = (v for v in sgd.variables if "momentum" in v.path and not v.has_whole_value)
    assert not slot.find_rows(np.array([5])).any()


def test_rows_that_are_not_used_expire(strategy):
    model, (table,) = made(strategy, eviction=Eviction(ttl_steps=5), max_rows=10_000)
    train(model, [np.arange(160).reshape(-1, 2)])
    again = np.resize(np.arange(1000, 1032), (30 * BATCH_SIZE, 2))
    train(model, [again])
    np.testing.assert_array_equal(ids_of(table), np.arange(1000, 1032))
    assert table.figures()["evicted"] == 160


def test_rows_expire_by_the_clock(strategy):
    eviction = Eviction(ttl_seconds=0.5)
    model, (table,) = made(strategy, eviction=eviction, max_rows=10_000)
    train(model, [np.arange(64).reshape(-1, 2)])
    # A second later by the clock of the ps.
    used = table._usage.access
    rows = used.read(np.arange(64))
    used.write(np.arange(64), rows - [[0, 2]])
    assert table.evict_where(older_than=datetime.timedelta(days=1)) == 0
    assert table.evict_where(older_than=datetime.timedelta(seconds=1)) == 64
    train(model, [np.arange(64).reshape(-1, 2)])
    used.write(np.arange(64), used.read(np.arange(64)) - [[0, 2]])
    train(model, [np.resize(np.arange(1000, 1032), (10 * BATCH_SIZE, 2))])
    np.testing.assert_array_equal(ids_of(table), np.arange(1000, 1032))
    assert table.figures()["evicted"] == 64


def test_rows_and_their_slots_stay_within_bytes(strategy):
    # 4 elements of a row, 4 of a slot, the use, and 64 bytes beside.
    num_bytes = 100 * (4 * 4 + 4 * 4 + 4 + 64)
    model, (table,) = made(strategy, eviction=Eviction(), max_rows=None, max_bytes_per_ps=num_bytes)
    num_ps = len(table.embeddings.shards)
    train(model, [np.arange(4000).reshape(-1, 2)])
    assert 80 * num_ps < table.num_rows <= 100 * num_ps
    # Without an eviction, further ids get no row.
    model, (table,) = made(strategy, max_rows=None, max_bytes_per_ps=num_bytes)
    train(model, [np.arange(4000).reshape(-1, 2)])
    most = num_bytes // (4 * 4 + 4 * 4 + 64)
    assert table.num_rows == most * num_ps
    assert table.figures()["refused_for_room"] == 4000 - most * num_ps


def test_rows_that_were_not_updated_are_removed_by_hand(strategy, tmp_path):
    model, (table,) = made(strategy, eviction=Eviction("lfu"), max_rows=10_000)
    train(model, [np.arange(320).reshape(-1, 2)])  # 10 steps
    told = table.evicted()
    assert (len(told.ids), told.is_complete) == (0, True)
    assert table.evict_where(older_than=4) == 5 * 2 * BATCH_SIZE
    kept = np.arange(160, 320)
    np.testing.assert_array_equal(ids_of(table), kept)
    told = table.evicted(since=told.mark)
    np.testing.assert_array_equal(np.sort(told.ids), np.arange(160))
    assert len(table.evicted(since=told.mark).ids) == 0
    # A file has none of them.
    model.save_weights(tmp_path / "a.weights.h5")
    pieces = rows_in_file(tmp_path / "a.weights.h5", table.name)
    np.testing.assert_array_equal(np.concatenate([ids for ids, _ in pieces]), kept)
    with pytest.raises(kerasps.InputError, match="`since` of `evicted`"):
        table.evicted(since="yesterday")
    with pytest.raises(kerasps.UnsupportedError, match="an Eviction with `ttl_seconds`"):
        table.evict_where(older_than=datetime.timedelta(days=30))
    _, (other,) = made(strategy)
    with pytest.raises(kerasps.UnsupportedError, match="Nobody notes when the rows"):
        other.evict_where(older_than=1)
    with pytest.raises(kerasps.UnsupportedError, match="keeps no removed ids"):
        other.evicted()


def test_more_ids_are_gone_than_a_ps_keeps(strategy):
    model, (table,) = made(strategy, eviction=Eviction(), max_rows=100)
    train(model, [np.arange(4000).reshape(-1, 2)])
    told = table.evicted()
    assert not told.is_complete
    num_gone = table.figures()["evicted"]
    assert 100 < len(told.ids) < num_gone
    # The last ones.
    assert told.ids.min() > num_gone - 2 * len(told.ids)


def test_rows_are_removed_by_hand(strategy):
    model, (table, other) = made(strategy, 2, CountAdmission(2))
    train(model, [np.tile(np.arange(64).reshape(-1, 2), (2, 1))] * 2)
    counted = np.array([[500, 501]])
    model.train_on_batch([counted, counted], np.ones((1, 1)))
    before = table.figures()
    assert before["candidates"] > 0
    rows = ids_of(table)
    assert table.evict([*rows[:10], 500, 501, 2**40]) == 10
    after = table.figures()
    assert after["rows"] == before["rows"] - 10
    assert after["candidates"] == before["candidates"] - 2
    np.testing.assert_array_equal(ids_of(table), rows[10:])
    assert other.figures()["candidates"] == before["candidates"]


def test_the_use_of_rows_is_in_files(strategy, tmp_path):
    model, (table,) = made(strategy, eviction=Eviction("lfu"))
    train(model, [moving(0, 20)])
    kept = ids_of(table)
    usage = table._usage.access.read(kept)
    model.save_weights(tmp_path / "a.weights.h5")
    checkpoint = tf_checkpoint(model)
    checkpoint.write(tmp_path / "checkpoint")
    for load in (
        lambda: model.load_weights(tmp_path / "a.weights.h5"),
        lambda: checkpoint.read(tmp_path / "checkpoint").assert_consumed(),
    ):
        train(model, [moving(5, 20) + 10_000])
        load()
        np.testing.assert_array_equal(ids_of(table), kept)
        np.testing.assert_array_equal(table._usage.access.read(kept), usage)
        train(model, [np.array([[7, 7]])])
        # Time goes on from the last use.
        tick, count = table._usage.access.read(np.array([7]))[0]
        assert tick == usage[:, 0].max() + 1
        assert count == usage[list(kept).index(7), 1] + 1 if 7 in kept else 1


def test_a_backup_within_an_epoch_has_counts_and_uses(strategy, tmp_path):
    ids, targets = moving(0, 20) % 200, np.ones((20 * BATCH_SIZE, 1))

    def fit(*callbacks):
        # So few rows that none is given up: which one is drawn depends on the order of places.
        options = {"eviction": Eviction("lfu"), "max_rows": 2000, "name": "table"}
        model, (table,) = made(strategy, 1, CountAdmission(3), **options)
        with contextlib.suppress(Stop):
            model.fit(
                ids,
                targets,
                batch_size=BATCH_SIZE,
                epochs=2,
                shuffle=False,
                verbose=0,
                callbacks=list(callbacks),
            )
        kept, candidates = ids_of(table), table._candidates.sorted_ids()
        counts = table._candidates.find_rows(candidates)
        return kept, table.rows(kept), table._usage.access.read(kept), candidates, counts

    def backups():
        return keras.callbacks.BackupAndRestore(
            tmp_path / "backups", save_freq=4, delete_checkpoint=False
        )

    begun = []

    def stop_at(batch, logs):
        begun.append(batch)
        if len(begun) == 10:
            raise Stop

    expected = fit()
    assert len(expected[3]) > 0
    stopping = keras.callbacks.LambdaCallback(on_train_batch_end=stop_at)
    first = fit(backups(), stopping)
    assert len(first[0]) < len(expected[0])
    resumed = fit(backups())
    for at, (ours, uninterrupted) in enumerate(zip(resumed, expected, strict=True)):
        # Sums of gradients are in the order of rows on the ps, but all else is exact.
        compare = np.testing.assert_allclose if at == 1 else np.testing.assert_array_equal
        compare(ours, uninterrupted, **({"rtol": 1e-4, "atol": 1e-7} if at == 1 else {}))


class Stop(Exception):
    """Ends a training."""


def tf_checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def test_the_use_of_rows_goes_to_one_process_and_back(strategy, tmp_path):
    eviction = Eviction("lfu", ttl_seconds=1000)
    model, (table,) = made(strategy, eviction=eviction)
    train(model, [moving(1)])
    model.save_weights(tmp_path / "on.weights.h5")
    local, (there,) = make_model(eviction=eviction, max_rows=MAX_ROWS)
    local.load_weights(tmp_path / "on.weights.h5")
    kept = ids_of(table)
    np.testing.assert_array_equal(ids_of(there), kept)
    np.testing.assert_array_equal(there._usage.find_rows(kept), table._usage.find_rows(kept))
    # There, too, the rows that are used least go first.
    train(local, [np.arange(10**6, 10**6 + 2 * MAX_ROWS).reshape(-1, 2)])
    assert there.num_rows == MAX_ROWS
    local.save_weights(tmp_path / "local.weights.h5")
    model.load_weights(tmp_path / "local.weights.h5")
    kept = ids_of(there)
    np.testing.assert_array_equal(ids_of(table), kept)
    np.testing.assert_array_equal(table._usage.find_rows(kept), there._usage.find_rows(kept))


def test_rows_are_given_up_by_hand_in_one_process():
    model, (table,) = make_model([CountAdmission(2)])
    ids = np.tile(np.arange(64).reshape(-1, 2), (2, 1))
    train(model, [ids])
    model.train_on_batch(np.array([[500, 501]]), np.ones((1, 1)))
    (slot,) = (v for v in model.optimizer.variables if hasattr(v, "find_rows"))
    rows, slots = table.rows(np.arange(64)), slot.find_rows(np.arange(64))
    assert table.evict([*range(10), 500, 2**40]) == 10
    figures = table.figures()
    assert (figures["rows"], figures["candidates"]) == (54, 1)
    np.testing.assert_array_equal(table.rows(np.arange(10, 64)), rows[10:])
    np.testing.assert_array_equal(slot.find_rows(np.arange(10, 64)), slots[10:])
    train(model, [ids])
    assert table.num_rows == 64
