"""Restores tables from a chain of deltas that a process with another number of ps wrote, trains on
with evictions, and writes another chain; run by test_dynamic_across_clusters.py.

    delta_chain.py NUM_PS DIRECTORY EPOCHS

Prints one JSON line.
"""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
from scenario import local_strategy, print_report

import kerasps
from kerasps.layers import DynamicEmbedding, Eviction
from kerasps.saving.backup_files import BackupDirectory
from support.any_ids import differences, state_of

NUM_PS, DIRECTORY, EPOCHS = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
STEPS, BATCH_SIZE, ROWS = 8, 8, 20_000
EXPECTED = DIRECTORY / "expected.npz"


def make_model():
    inputs = [keras.Input((2,), dtype="int64") for _ in range(2)]
    tables = [
        DynamicEmbedding(4, seed=1, **options)
        for options in (
            {},
            {"max_rows": 240, "eviction": Eviction("lru", low=0.5)},
        )
    ]
    flat = [keras.layers.Flatten()(t(ids)) for t, ids in zip(tables, inputs, strict=True)]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(flat)))
    model.compile(keras.optimizers.Adagrad(0.01), "mse")
    return model, tables


class Check(keras.callbacks.Callback):
    """Compares the restored state; then each epoch has rows by hand."""

    def on_train_begin(self, logs=None):
        if EXPECTED.exists():
            report["different"] = differences(state_of(self.model), dict(np.load(EXPECTED)))
        else:
            tables[0].load_rows(np.arange(10**6, 10**6 + ROWS), np.ones((ROWS, 4), "float32"))

    def on_epoch_begin(self, epoch, logs=None):
        tables[0].evict(10**6 + np.arange(2) + 3 * epoch)
        tables[0].load_rows([2 * 10**6 + epoch], np.full((1, 4), epoch, "float32"))


report = {"different": []}
with local_strategy(num_workers=1, num_ps=NUM_PS) as (cluster, strategy):
    with strategy.scope():
        model, tables = make_model()
    draw = np.random.default_rng(0)
    late = np.arange(STEPS * BATCH_SIZE)[:, None] * 3
    ids = [late + draw.zipf(1.4, (STEPS * BATCH_SIZE, 2)) % 200 for _ in tables]
    backups = kerasps.BackupAndRestore(
        DIRECTORY / "backups",
        interval_s=10**6,
        delta=True,
        full_every=1000,
        delete_checkpoint=False,
    )

    class Move(keras.utils.PyDataset):
        """Other ids in each epoch."""

        epoch = 0

        def __len__(self):
            return STEPS

        def __getitem__(self, index):
            rows = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
            return tuple(each[rows] + 40 * self.epoch for each in ids), np.ones(BATCH_SIZE)

        def on_epoch_end(self):
            self.epoch += 1

    model.fit(Move(), epochs=EPOCHS, verbose=0, callbacks=[backups, Check()])
    np.savez(EXPECTED, **state_of(model))
    report["lengths"] = [
        len(each.chain) for each in BackupDirectory(DIRECTORY / "backups").backups()
    ]
    report["evicted"] = tables[1].figures()["evicted"]
    print_report(report)
