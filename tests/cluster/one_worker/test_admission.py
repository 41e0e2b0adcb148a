"""Admission of ids to tables without a vocabulary on the ps."""

from __future__ import annotations

import gc

import keras
import numpy as np

from kerasps.dynamic.tables import row_access
from kerasps.layers import CountAdmission, ProbabilityAdmission
from support.admission import (
    assert_equals_model,
    figures_of,
    make_model,
    make_model_of_two_calls,
    stream,
    train,
)


def made(strategy, admissions, **options):
    with strategy.scope():
        return make_model(admissions, **options)


def test_rows_and_counts_of_a_group_equal_a_model_in_numpy(strategy):
    bounds = [3, 2, 1]
    streams = [stream(seed) for seed in range(3)]
    admissions = [CountAdmission(n) for n in bounds]
    model, tables = made(strategy, admissions, steps_per_execution=4)
    train(model, streams)
    for table, n, ids in zip(tables, bounds, streams, strict=True):
        assert_equals_model(table, n, ids)


def test_a_step_counts_an_id_once_in_all_calls_of_the_layer(strategy):
    with strategy.scope():
        model, table = make_model_of_two_calls(CountAdmission(2))
    first, second = np.array([[7, 7, 8]]), np.array([[7, 9, 9]])
    model.train_on_batch([first, second], np.ones((1, 1)))
    assert figures_of(table) == {"rows": 0, "candidates": 3, "refused_by_admission": 3}
    model.train_on_batch([first, first], np.ones((1, 1)))
    assert figures_of(table) == {"rows": 2, "candidates": 1, "refused_by_admission": 3}


def test_each_ps_counts_at_most_its_share_of_the_candidates(strategy):
    limited = CountAdmission(3, max_candidates=20)
    model, tables = made(strategy, [limited, limited])
    train(model, [stream(0), stream(1)])
    num_ps = len(tables[0].embeddings.shards)
    for table in tables:
        # A ps that draws a candidate of the same batch counts the new one not at all.
        assert 10 <= table.figures()["candidates"] <= 20 + num_ps
        ids = np.concatenate([ids for ids, _ in table.items()])
        assert {1, 2, 3} <= set(ids)


def test_probability_decides_as_in_one_process(strategy):
    ids = np.arange(1000, dtype=np.int64).reshape(-1, 2)
    found = []
    admissions = [ProbabilityAdmission(0.3), None]
    for make in (lambda: made(strategy, admissions, max_rows=2000), lambda: None):
        model, tables = make() or make_model(admissions, max_rows=2000)
        train(model, [ids, ids])
        found.append([np.sort(np.concatenate([i for i, _ in t.items()])) for t in tables])
        assert tables[0].figures()["refused_by_admission"] == 1000 - len(found[-1][0])
        assert tables[1].figures()["refused_by_admission"] == 0
    for ours, alone in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, alone)


def test_an_id_without_a_row_reads_zeros(strategy):
    model, (table,) = made(strategy, [CountAdmission(2)], default_row="zeros", optimizer="sgd")
    alone, _ = make_model([CountAdmission(2)], default_row="zeros", optimizer="sgd")
    ids, targets = stream(0)[:64], np.ones((64, 1), "float32")
    losses = [
        each.fit(ids, targets, batch_size=16, shuffle=False, epochs=3, verbose=0).history["loss"]
        for each in (model, alone)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert not table.rows([2**40]).any()


def test_figures_of_a_table_begin_at_zero_where_another_one_was(strategy):
    model, tables = made(strategy, [CountAdmission(3), None])
    train(model, [stream(0), stream(1)])
    assert tables[0].figures()["refused_by_admission"] > 0
    kept = tables[1]  # its pool stays
    del model, tables
    keras.backend.clear_session()
    gc.collect()
    _, new = made(strategy, [CountAdmission(3), None])
    assert [set(table.figures().values()) for table in new] == [{0}, {0}]
    assert kept.num_rows > 0


def test_candidates_go_from_ps_to_one_process_and_back(strategy, tmp_path, monkeypatch):
    monkeypatch.setattr(row_access, "CHUNK_BYTES", 512)
    monkeypatch.setattr(row_access, "PIECE", 17)
    model, (table,) = made(strategy, [CountAdmission(3)])
    alone, (there,) = make_model([CountAdmission(3)])
    train(model, [stream(0)])
    model.save_weights(tmp_path / "a.weights.h5")
    alone.load_weights(tmp_path / "a.weights.h5")
    figures = table.figures()
    assert there.figures()["candidates"] == figures["candidates"] > 0
    alone.save_weights(tmp_path / "b.weights.h5")
    train(model, [stream(1)])
    model.load_weights(tmp_path / "b.weights.h5")
    assert table.figures()["candidates"] == figures["candidates"]
    both = np.concatenate([stream(0), stream(1)])
    train(model, [stream(1)])
    assert table.figures()["candidates"] != figures["candidates"]
    ids = np.concatenate([ids for ids, _ in table.items()])
    counts = dict.fromkeys(np.unique(both), 0)
    for start in range(0, len(both), 16):
        for key in np.unique(both[start : start + 16]):
            counts[key] += 1
    assert set(ids) == {key for key, count in counts.items() if count >= 3}


def test_loaded_rows_need_no_admission(strategy):
    _, (table,) = made(strategy, [CountAdmission(5)])
    table.load_rows([7], np.ones((1, 4)))
    np.testing.assert_array_equal(table.rows([7]), np.ones((1, 4)))
