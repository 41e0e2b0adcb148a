"""Admission of ids to a table without a vocabulary, in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import kerasps
from kerasps.layers import CountAdmission, DynamicEmbedding, ProbabilityAdmission
from support.admission import (
    assert_equals_model,
    figures_of,
    make_model,
    make_model_of_two_calls,
    stream,
    train,
)


@pytest.mark.parametrize("n", [1, 3])
def test_rows_and_counts_equal_a_model_in_numpy(n):
    model, (table,) = make_model([CountAdmission(n)])
    train(model, [stream(0)])
    assert_equals_model(table, n, stream(0))


def test_a_step_counts_an_id_once_in_all_calls_of_the_layer():
    model, table = make_model_of_two_calls(CountAdmission(2))
    first, second = np.array([[7, 7, 8]]), np.array([[7, 9, 9]])
    model.train_on_batch([first, second], np.ones((1, 1)))
    assert figures_of(table) == {"rows": 0, "candidates": 3, "refused_by_admission": 3}
    model.train_on_batch([first, first], np.ones((1, 1)))
    assert figures_of(table) == {"rows": 2, "candidates": 1, "refused_by_admission": 3}


def test_at_most_so_many_candidates_are_counted():
    model, (table,) = make_model([CountAdmission(3, max_candidates=20)])
    train(model, [stream(0)])
    # Those that got rows are no candidates any more.
    assert 10 <= table.figures()["candidates"] <= 20
    # The most frequent ids get rows nevertheless.
    ids = np.concatenate([ids for ids, _ in table.items()])
    assert {1, 2, 3} <= set(ids)


def test_candidates_are_in_files_of_the_model(tmp_path):
    model, (table,) = make_model([CountAdmission(3)])
    train(model, [stream(0)])
    model.save(tmp_path / "a.keras")
    loaded = keras.models.load_model(tmp_path / "a.keras")
    (layer,) = (each for each in loaded.layers if isinstance(each, DynamicEmbedding))
    assert layer.admission == table.admission
    for each in (model, loaded):
        train(each, [stream(1)])
    assert layer.figures()["candidates"] == table.figures()["candidates"]
    np.testing.assert_array_equal(layer.rows(np.arange(500)), table.rows(np.arange(500)))


def test_a_file_with_more_candidates_brings_those_with_the_highest_counts(tmp_path):
    model, _ = make_model([CountAdmission(3)])
    small, (table,) = make_model([CountAdmission(3, max_candidates=10)])
    train(model, [stream(0)])
    model.save_weights(tmp_path / "a.weights.h5")
    before = model.layers[1]._candidates
    small.load_weights(tmp_path / "a.weights.h5")
    counts = table._candidates.find_rows(table._candidates.sorted_ids())
    assert len(counts) == 10
    assert counts.min() == np.sort(before.find_rows(before.sorted_ids())[:, 0])[-10]


def test_the_seed_and_the_id_decide_by_probability():
    ids = np.arange(10_000, dtype=np.int64).reshape(-1, 2)
    made = []
    for _ in range(2):
        model, (table,) = make_model([ProbabilityAdmission(0.25)], max_rows=10_000)
        train(model, [ids])
        made.append(np.sort(np.concatenate([ids for ids, _ in table.items()])))
    np.testing.assert_array_equal(*made)
    # Five standard deviations of a binomial distribution.
    assert abs(len(made[0]) - 2500) < 5 * np.sqrt(10_000 * 0.25 * 0.75)
    assert table.figures()["refused_by_admission"] == 10_000 - len(made[0])


def test_an_id_without_a_row_reads_zeros():
    model, (table,) = make_model([CountAdmission(2)], default_row="zeros")
    ids = np.array([[5, 6]])
    assert not table.rows([5]).any()
    seen = []
    for _ in range(3):
        seen.append(float(model.predict_on_batch(ids)[0, 0]))
        model.train_on_batch(ids, np.ones((1, 1)))
    # It is admitted when it comes for the second time, and read after that.
    assert seen[:2] == [0, 0]
    assert seen[2] != 0
    assert table.num_rows == 2


def test_loaded_rows_need_no_admission():
    _, (table,) = make_model([CountAdmission(5)])
    table.load_rows([7], np.ones((1, 4)))
    np.testing.assert_array_equal(table.rows([7]), np.ones((1, 4)))


def test_the_configuration_has_the_admission():
    layer = DynamicEmbedding(4, admission=ProbabilityAdmission(0.5), default_row="zeros")
    again = DynamicEmbedding.from_config(layer.get_config())
    assert again.admission == layer.admission != ProbabilityAdmission(0.4)
    assert hash(again.admission) == hash(layer.admission)
    assert repr(again.admission) == "ProbabilityAdmission(p=0.5)"
    assert again.default_row == "zeros"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CountAdmission(0), "`n` of a CountAdmission.*at least 1"),
        (lambda: CountAdmission(2, max_candidates=0), "`max_candidates` of a CountAdmission"),
        (lambda: ProbabilityAdmission(1.5), "above 0 and at most 1. Received: 1.5"),
        (lambda: ProbabilityAdmission(True), "above 0 and at most 1. Received: True"),
        (lambda: DynamicEmbedding(4, admission=3), "a ProbabilityAdmission or None. Received: 3"),
        (lambda: DynamicEmbedding(4, default_row="ones"), "'first' or 'zeros'"),
    ],
)
def test_arguments_that_cannot_be_used(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_errors_are_of_the_package():
    with pytest.raises(kerasps.InputError):
        ProbabilityAdmission("half")
