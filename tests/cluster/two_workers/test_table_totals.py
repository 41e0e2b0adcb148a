"""The figures of tables are exact sums over workers and ps."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import kerasps
from kerasps.layers import CountAdmission
from support.admission import make_model

BATCH_SIZE, STEPS = 8, 40


def ids_of_worker(worker):
    """Returns the ids of each batch of a worker. Both have some of them."""
    return np.random.default_rng(worker).zipf(1.3, (STEPS, BATCH_SIZE, 2)) % 500


def batches(context):
    ids = ids_of_worker(context.input_pipeline_id)
    return tf.data.Dataset.from_tensor_slices((ids, np.ones((STEPS, BATCH_SIZE, 1))))


def test_figures_are_exact_sums_over_workers_and_ps(strategy):
    with strategy.scope():
        admission = CountAdmission(2)
        model, (table,) = make_model([admission], steps_per_execution=5, name="items")
    data = kerasps.DatasetCreator(batches)
    callbacks = [kerasps.TableMetrics()]
    logs = model.fit(data, steps_per_epoch=2 * STEPS, verbose=0, callbacks=callbacks).history

    # In how many batches each id was, of whichever worker.
    in_batches = [np.unique(batch) for worker in range(2) for batch in ids_of_worker(worker)]
    ids, times = np.unique(np.concatenate(in_batches), return_counts=True)
    figures = table.figures()
    assert figures["rows"] == figures["inserted"] == np.sum(times > 1)
    assert figures["candidates"] == np.sum(times == 1) > 0
    assert figures["refused_by_admission"] == len(ids)
    assert logs["items_rows"] == logs["items_inserted"] == [figures["rows"]]
    assert logs["items_dropped"] == [len(ids)]
    found = np.concatenate([ids for ids, _ in table.items()])
    np.testing.assert_array_equal(np.sort(found), ids[times > 1])

    (size,) = strategy.load_report().tables.values()
    assert (size.num_rows, size.made, size.dropped) == (figures["rows"], figures["rows"], len(ids))
    assert f"{figures['rows']:,}" in str(strategy.load_report())
