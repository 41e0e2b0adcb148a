"""Trains on three workers with callbacks that are told of batches; run by test_batch_callbacks.py.

    python tests/processes/batch_callbacks.py sync

Prints one JSON line: the rate that the step of each batch had, and how much was done and told.
"""

from __future__ import annotations

import sys

from scenario import local_strategy, print_report

from support.batch_callbacks import Scheduled, Told, arrays, rates_used, rows_model

NUM_WORKERS = 3
UPDATE_MODE = sys.argv[1]


def fit(strategy, *callbacks, num_batches=None):
    model = rows_model(strategy)
    data = arrays()
    data["x"], data["y"] = data["x"][:num_batches], data["y"][:num_batches]
    model.fit(**data, verbose=0, callbacks=[*callbacks])
    return model, int(model.optimizer.iterations)


with local_strategy(NUM_WORKERS, 1, update_mode=UPDATE_MODE, table_min_bytes=0) as (
    cluster,
    strategy,
):
    model, updates = fit(strategy, Scheduled("end" if UPDATE_MODE == "sync" else "begin"))
    # A synchronous update is of the mean of what workers bring.
    scale = NUM_WORKERS if UPDATE_MODE == "sync" else 1
    report = {"rates": rates_used(model, scale=scale), "updates": updates}
    told = Told(stop_at=7, seconds=0.05)
    report["stopped"] = fit(strategy, told)[1], len(told.calls) // 2
    told = Told(reads=True)
    report["uneven"] = fit(strategy, told, num_batches=16)[1], len(told.calls) // 2
    print_report(report)
