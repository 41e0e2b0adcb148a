"""A trace of a training: every task, and each step's pull, compute and push in their order."""

from __future__ import annotations

import collections
import gzip
import json
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import kerasps
from kerasps.tools.tracing import Trace
from support.compare import MAX_ATTEMPTS
from support.executions import sent_sizes
from support.matrix import with_matrix

TASKS = ["chief-0", "ps-0", "ps-1", "ps-2", "worker-0", "worker-1"]


def table_model(strategy, **compiled):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,), dtype="int32"),
                keras.layers.Embedding(300, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(32),
                keras.layers.Dense(1),
            ]
        )
        model.compile("adam", "mse", **compiled)
    return model


def table_data(context):
    batch = np.ones((16, 8), "int32"), np.ones((16, 1), "float32")
    return tf.data.Dataset.from_tensors(batch).repeat()


DATA = kerasps.DatasetCreator(table_data)


def slices_of(report):
    """The events of the file, by the name of their process and their own, in their order."""
    content = json.loads(gzip.decompress(report.file.read_bytes()))
    named = [event for event in content["traceEvents"] if event["name"] == "process_name"]
    processes = {event["pid"]: event["args"]["name"].partition(" (")[0] for event in named}
    found = collections.defaultdict(list)
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            found[processes[event["pid"]], event["name"]].append(event)
    return found, sorted(processes.values()), content["otherData"]


def times(events):
    """In nanoseconds: of microseconds, the sum of two may differ from a third by a rounding."""
    return {
        event["args"]["step"]: (
            round(event["ts"] * 1e3),
            round((event["ts"] + event["dur"]) * 1e3),
        )
        for event in events
    }


@pytest.mark.parametrize("steps_per_execution", with_matrix([1, 5, 40], at_length=[1, 40]))
def test_a_trace_holds_every_task_and_each_step_in_order(
    strategy, tmp_path, capsys, steps_per_execution
):
    model = table_model(strategy, steps_per_execution=steps_per_execution)
    trace = Trace(tmp_path, first_step=80, num_steps=30)
    model.fit(DATA, steps_per_epoch=800, epochs=2, verbose=0, callbacks=[trace])
    report = trace.report
    assert report.num_steps == 30
    assert report.missing == {}
    assert capsys.readouterr().out == f"{report}\n"
    assert f" {report.limit}" in str(report)
    slices, processes, about = slices_of(report)
    expected = ["coordinator 0", "ps 0", "ps 1", "ps 2", "worker 0", "worker 1"]
    assert processes == expected
    assert about["limit"] == report.limit
    assert about["clocks_moved_ms"] == {}
    found = collections.Counter()
    for worker in ("worker 0", "worker 1"):
        pulls, computes, pushes, data = (
            times(slices[worker, phase]) for phase in ("pull", "compute", "push", "data")
        )
        assert pulls.keys() == computes.keys() == pushes.keys() == data.keys()
        found.update(computes.keys())
        for step in computes:
            assert pulls[step][0] <= computes[step][0] <= computes[step][1] <= pushes[step][1]
            assert pulls[step][1] <= computes[step][0]
            assert data[step][0] <= data[step][1] <= computes[step][0]
    assert found == dict.fromkeys(range(30), 1)
    # Each ps that holds something has each step's pull, lock and push, on the same clock.
    used = [ps for ps in ("ps 0", "ps 1", "ps 2") if slices[ps, "push"]]
    assert used
    computes = times(slices["worker 0", "compute"] + slices["worker 1", "compute"])
    for ps in used:
        pulls, locks, pushes = (times(slices[ps, phase]) for phase in ("pull", "lock", "push"))
        assert pulls.keys() == set(range(30))
        for step, (begin, end) in pushes.items():
            assert pulls[step][0] <= computes[step][0]
            assert begin <= locks[step][0] <= locks[step][1] <= end
            assert computes[step][0] < begin
    assert slices["coordinator 0", "into_totals"]
    assert all(sum(shares.values()) == pytest.approx(1) for shares in report.shares.values())


def test_the_profile_page_of_tensorboard_finds_every_task(strategy, tmp_path):
    trace = Trace(tmp_path, first_step=10, num_steps=5)
    table_model(strategy).fit(DATA, steps_per_epoch=300, verbose=0, callbacks=[trace])
    files = sorted(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    assert [file.name.removesuffix(".xplane.pb") for file in files] == TASKS
    for file in files:
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
        assert "/host:CPU" in [plane.name for plane in space.planes]


@pytest.mark.parametrize(
    ("make_model", "steps_per_execution"),
    with_matrix([("table", 10), ("dense", 1)], at_length=[("dense", 1)]),
)
def test_waiting_for_data_is_what_limits_a_slow_dataset(
    strategy, tmp_path, make_model, steps_per_execution
):
    """A step that looks rows up needs the batch for its pull, and one execution's batches all; one
    without a table can begin with what follows from the variables alone.
    """
    if make_model == "table":
        model = table_model(strategy, steps_per_execution=steps_per_execution)
    else:
        with strategy.scope():
            layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((8,), dtype="int32"), *layers])
            model.compile("adam", "mse", steps_per_execution=steps_per_execution)

    def slow(context):
        # A single step also waits for the coordinator, the longer the busier the machine is.
        return table_data(context).apply(sleep(100_000 if steps_per_execution == 1 else 30_000))

    reports = []
    for _ in range(MAX_ATTEMPTS):
        trace = Trace(tmp_path, first_step=40, num_steps=40)
        data = kerasps.DatasetCreator(slow)
        model.fit(data, steps_per_epoch=160, verbose=0, callbacks=[trace])
        reports.append(trace.report)
        if all(shares["data"] > 0.4 for shares in trace.report.shares.values()):
            break
    else:
        pytest.fail(f"other limits than data, {MAX_ATTEMPTS} times: {reports}")
    assert " waits for data " in trace.report.limit


def test_a_fit_that_is_shorter_has_no_trace(strategy, tmp_path):
    trace = Trace(tmp_path, first_step=50)
    with pytest.warns(UserWarning, match="`fit` ended before the first step to trace"):
        table_model(strategy).fit(DATA, steps_per_epoch=20, verbose=0, callbacks=[trace])
    assert trace.report is None
    assert list(tmp_path.iterdir()) == []


def test_a_fit_that_ends_meanwhile_has_the_steps_until_then(strategy, tmp_path):
    trace = Trace(tmp_path, first_step=0, num_steps=500)
    table_model(strategy).fit(DATA, steps_per_epoch=40, verbose=0, callbacks=[trace])
    assert trace.report.num_steps == 40
    assert trace.report.missing == {}


def test_twice_in_a_row_and_after_a_failure(strategy, tmp_path):
    model = table_model(strategy)
    trace = Trace(tmp_path, first_step=0, num_steps=10)

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        model.fit(DATA, steps_per_epoch=10, verbose=0, callbacks=[trace, Fails()])
    assert "kerasps-trace" not in [thread.name for thread in threading.enumerate()]
    files = []
    for _ in range(2):
        model.fit(DATA, steps_per_epoch=300, verbose=0, callbacks=[trace])
        assert trace.report.missing == {}
        assert trace.report.num_steps == 10
        files.append(trace.report.file)
    assert sorted(tmp_path.glob("*.json.gz")) == sorted(files)
    assert len(set(files)) == 2


def test_a_profiler_that_is_in_use_is_said_to_be(strategy, tmp_path):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        trace = Trace(tmp_path, first_step=0, num_steps=10)
        table_model(strategy).fit(DATA, steps_per_epoch=300, verbose=0, callbacks=[trace])
    finally:
        tf.profiler.experimental.stop(save=False)
    assert trace.report.num_steps == 10
    assert list(trace.report.missing) == [("chief", 0)]
    assert "chief 0 is missing: " in str(trace.report)


def test_a_trace_does_not_shorten_executions(strategy, tmp_path, monkeypatch):
    """It is told of batches now and then, as the progress bar is."""
    sent_sizes(monkeypatch)
    model = table_model(strategy)
    told = []

    class Counting(Trace):
        def on_train_batch_end(self, batch, logs=None):
            told.append(batch)
            super().on_train_batch_end(batch, logs)

    model.fit(DATA, steps_per_epoch=600, verbose=0)  # from here on, steps are known to be fast
    model.fit(DATA, steps_per_epoch=600, verbose=0, callbacks=[Counting(tmp_path, first_step=10)])
    assert told[-1] == 599
    assert len(told) < 300
