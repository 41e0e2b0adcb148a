"""Trains on three workers by synchronous updates, with callbacks that are told of batches; run
by test_batch_callbacks.py.

Prints one JSON line: the rate that the step of each batch had, and how much was done and told.
"""

from __future__ import annotations

from scenario import local_strategy, print_report

from support.batch_callbacks import Scheduled, Told, arrays, rates_used, rows_model

NUM_WORKERS = 3


def fit(strategy, *callbacks, num_batches=None):
    model = rows_model(strategy)
    data = arrays()
    data["x"], data["y"] = data["x"][:num_batches], data["y"][:num_batches]
    model.fit(**data, verbose=0, callbacks=[*callbacks])
    return model, int(model.optimizer.iterations)


with local_strategy(NUM_WORKERS, 1, update_mode="sync", table_min_bytes=0) as (_, strategy):
    model, updates = fit(strategy, Scheduled("end"))
    # A synchronous update is of the mean of what workers bring.
    report = {"rates": rates_used(model, scale=NUM_WORKERS), "updates": updates}
    told = Told(stop_at=7, seconds=0.05)
    report["stopped"] = fit(strategy, told)[1], len(told.calls) // 2
    told = Told(reads=True)
    report["uneven"] = fit(strategy, told, num_batches=16)[1], len(told.calls) // 2
    print_report(report)
