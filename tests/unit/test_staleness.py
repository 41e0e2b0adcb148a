"""How stale updates are: what a report says, and what is counted on a cluster in this process."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import kerasps
from kerasps.training import Staleness, WorkerStaleness
from support.models import counting_model, endless

STEPS = 30


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


def tensors_written(directory):
    """Return all that is in the event files of a directory: by tag, its kind and its tensors."""
    found = {}
    for path in directory.glob("events*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                kind = value.metadata.plugin_data.plugin_name
                tensors = found.setdefault(value.tag, [])
                tensors.append((kind or tensors[0][0], tf.make_ndarray(value.tensor)))
    return found


@pytest.mark.filterwarnings("ignore:Model failed to serialize as JSON")
def test_every_push_is_counted_and_tensorboard_shows_them(strategy, tmp_path):
    model = counting_model(strategy, steps_per_execution=5)
    num_ps = len({v.storage.device for v in model.variables if "ps" in v.storage.device})
    callbacks = [kerasps.StalenessLogger(tmp_path), keras.callbacks.TensorBoard(tmp_path)]
    history = model.fit(
        kerasps.DatasetCreator(endless), steps_per_epoch=STEPS, epochs=2, callbacks=callbacks
    ).history
    report = strategy.staleness()
    assert report.pushes == 2 * STEPS * num_ps
    for worker in report:
        assert worker.pushes == sum(worker.counts)
        assert worker.mean == pytest.approx(
            sum(i * count for i, count in enumerate(worker.counts)) / worker.pushes
        )
    assert max(history["staleness_max"]) == report.max
    assert sum(history["staleness_mean"]) / 2 == pytest.approx(report.mean)
    shown = tensors_written(tmp_path / "train")
    assert [float(value) for _, value in shown["epoch_staleness_mean"]] == pytest.approx(
        history["staleness_mean"]
    )
    bars = tensors_written(tmp_path / "staleness")
    assert {kind for own in bars.values() for kind, _ in own} == {"histograms"}
    assert sum(value[:, 2].sum() for own in bars.values() for _, value in own) == report.pushes


def test_a_report_is_of_the_running_or_last_fit(strategy):
    model = counting_model(strategy, steps_per_execution=5)
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(strategy.staleness().pushes)
    )
    data = kerasps.DatasetCreator(endless)
    model.fit(data, steps_per_epoch=STEPS, epochs=2, callbacks=[look], verbose=0)
    num_ps = seen[0] // STEPS
    assert seen == [STEPS * num_ps, 2 * STEPS * num_ps]
    # Steps that push nothing are not counted, and an evaluation leaves the report as it is.
    model.evaluate(data, steps=STEPS, verbose=0)
    assert strategy.staleness().pushes == 2 * STEPS * num_ps
    model.fit(data, steps_per_epoch=STEPS, verbose=0)
    assert strategy.staleness().pushes == STEPS * num_ps


def test_without_a_strategy_nothing_is_logged():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(
        tf.zeros([4, 1]), tf.zeros([4]), callbacks=[kerasps.StalenessLogger()], verbose=0
    )
    assert set(history.history) == {"loss"}
