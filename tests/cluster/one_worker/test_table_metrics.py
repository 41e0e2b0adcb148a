"""The figures of tables without a vocabulary, in logs of epochs and in the status."""

from __future__ import annotations

import numpy as np
import pytest

import kerasps
from kerasps.layers import CountAdmission, Eviction
from support.admission import BATCH_SIZE, make_model

EPOCHS, NUM_STEPS = 3, 20


def num_different(ids):
    """Returns the sum, over steps, of the different ids of a step."""
    return sum(len(np.unique(batch)) for batch in np.split(ids, len(ids) // BATCH_SIZE))


@pytest.mark.parametrize("admission", [None, CountAdmission(2)])
def test_logs_have_the_figures_of_each_epoch(strategy, admission):
    options = {"eviction": Eviction("lru", low=0.5), "max_rows": 400, "name": "items"}
    with strategy.scope():
        model, (table,) = make_model([admission], steps_per_execution=5, **options)
    ids = np.random.default_rng(1).zipf(1.2, (NUM_STEPS * BATCH_SIZE, 2)) % 3000
    arguments = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0, "epochs": EPOCHS}
    labels = np.ones((len(ids), 1))
    model.fit(ids, labels, **{**arguments, "epochs": 1})
    first = table.figures()
    # What is validated makes no rows, and is in no figure.
    validation = {"validation_data": (ids + 10**6, labels), "validation_batch_size": BATCH_SIZE}
    callbacks = [kerasps.TableMetrics()]
    logs = model.fit(ids, labels, callbacks=callbacks, **validation, **arguments).history

    figures = table.figures()
    assert logs["items_rows"][-1] == figures["rows"] == table.num_rows
    assert logs["items_share_of_max_rows"][-1] == figures["rows"] / 400
    dropped = ["refused_by_admission", "refused_for_room"]
    assert sum(logs["items_dropped"]) == sum(figures[name] - first[name] for name in dropped)
    for name in ("inserted", "evicted"):
        assert sum(logs[f"items_{name}"]) == figures[name] - first[name] > 0
    for epoch, hit_rate in enumerate(logs["items_hit_rate"]):
        misses = logs["items_inserted"][epoch] + logs["items_dropped"][epoch]
        assert hit_rate == pytest.approx(1 - misses / num_different(ids))
    past = first["mean_age_of_evicted"] * first["evicted"]
    ages = sum(np.multiply(logs["items_age_of_evicted"], logs["items_evicted"]))
    assert ages + past == pytest.approx(figures["mean_age_of_evicted"] * figures["evicted"])
    # A ps has no more places than it draws, so these are all rows.
    norms = np.linalg.norm(np.concatenate([rows for _, rows in table.items()]), axis=1)
    np.testing.assert_allclose(np.sort(table.norms()), np.sort(norms), rtol=1e-6)
    last = [logs[f"items_norm_{percent}"][-1] for percent in (25, 50, 75)]
    np.testing.assert_allclose(last, np.percentile(norms, (25, 50, 75)), rtol=1e-6)
    # Places that were given back count as drawn.
    assert 0 < len(table.norms(sample=7)) <= 7 * len(strategy.status().ps)

    (status,) = strategy.status().tables
    assert status.num_rows == figures["rows"]
    assert status.share_of_max_rows == pytest.approx(figures["rows"] / 400)
    assert status.rows_made_total == figures["inserted"]
    assert status.rows_evicted_total == figures["evicted"]
    assert status.gradients_dropped_total == sum(figures[name] for name in dropped)
