"""How stale updates are: what a report says. `smoke/test_staleness.py` is about what is counted."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import kerasps
from kerasps.training.contract.staleness import Staleness, WorkerStaleness


def of_worker(index, counts, largest=None):
    counts = (*counts, *[0] * (32 - len(counts)))
    pushes = sum(counts)
    mean = sum(i * count for i, count in enumerate(counts)) / pushes
    last = max(i for i, count in enumerate(counts) if count)
    return WorkerStaleness(index, counts, mean, largest or last)


def test_a_report_prints_a_histogram():
    report = Staleness([of_worker(0, [1200, 30, 0, 0, 0, 4, 1]), of_worker(2, [7, 1])])
    assert str(report).splitlines() == [
        "worker  pushes  mean  max      0   1  2  3  4-7",
        "     0   1,235  0.05    6  1,200  30  0  0  5",
        "     2       8  0.12    1      7   1  0  0  0",
    ]
    assert (report.pushes, report.max) == (1243, 6)
    assert report.mean == pytest.approx((30 + 20 + 6 + 1) / 1243)
    assert repr(report) == "<Staleness of 1243 pushes: mean=0.05 max=6>"


def test_the_last_column_is_of_all_that_were_staler():
    report = Staleness([of_worker(0, [5] + [0] * 30 + [2], largest=90)])
    header, row = str(report).splitlines()
    assert header.split()[-3:] == ["8-15", "16-30", "31+"]
    assert row.split() == ["0", "7", "8.86", "90", "5", "0", "0", "0", "0", "0", "0", "2"]


def test_a_report_of_nothing_says_so():
    assert str(Staleness([])) == "worker  pushes  mean  max  0  1"
    assert repr(Staleness([])) == "<Staleness of 0 pushes: mean=0.00 max=0>"
    assert (len(Staleness([])), Staleness([]).max, Staleness([])[:]) == (0, 0, ())


def test_without_a_strategy_nothing_is_logged():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(
        tf.zeros([4, 1]), tf.zeros([4]), callbacks=[kerasps.StalenessLogger()], verbose=0
    )
    assert set(history.history) == {"loss"}
