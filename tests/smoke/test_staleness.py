"""How stale updates are is counted on a cluster in this process, and TensorBoard shows it."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import kerasps
from support.models import counting_model, endless

STEPS = 30


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
    callbacks = [kerasps.StalenessLogger(tmp_path), keras.callbacks.TensorBoard(tmp_path)]
    history = model.fit(
        kerasps.DatasetCreator(endless), steps_per_epoch=STEPS, epochs=2, callbacks=callbacks
    ).history
    report = strategy.staleness()
    # Where small variables are while steps are in flight is another matter.
    assert report.pushes == 2 * STEPS * len(model.train_function.devices)
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
    assert {kind for pairs in bars.values() for kind, _ in pairs} == {"histograms"}
    assert sum(value[:, 2].sum() for pairs in bars.values() for _, value in pairs) == report.pushes


@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_an_execution_has_its_own_steps_however_many_a_result_has(strategy, steps_per_execution):
    """The advice of `strategy.status()` follows from their number."""
    model = counting_model(strategy, steps_per_execution=steps_per_execution)
    told = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    model.fit(kerasps.DatasetCreator(endless), steps_per_epoch=300, verbose=0, callbacks=[told])
    assert strategy._host.run_meter.execution_steps == steps_per_execution


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
