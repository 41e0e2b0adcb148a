"""Backups that write the difference: base and deltas in turn are the whole, bit for bit."""

from __future__ import annotations

import json
import shutil
import warnings

import keras
import numpy as np
import pytest

import kerasps
from kerasps.layers import CountAdmission, Eviction
from kerasps.saving import BackupStore, backup_files
from kerasps.saving.backup_files import BackupDirectory
from support.admission import BATCH_SIZE
from support.any_ids import differences, state_of

STEPS, EPOCHS, ROWS = 12, 5, 20_000
IDS = np.concatenate(
    [
        epoch * 60 + np.random.default_rng(epoch).zipf(1.4, (STEPS * BATCH_SIZE, 2)) % 200
        for epoch in range(EPOCHS)
    ]
)


def made(strategy):
    """Returns a model with a table that only gets rows, one that gives them up, and one with counts
    of candidates; the first has many rows, of which few change.
    """
    with strategy.scope():
        inputs = [keras.Input((2,), dtype="int64") for _ in range(3)]
        tables = [
            kerasps.layers.DynamicEmbedding(4, seed=1, **options)
            for options in (
                {},
                {"max_rows": 150, "eviction": Eviction("lru", low=0.7)},
                {"max_rows": 500, "admission": CountAdmission(3, max_candidates=2000)},
            )
        ]
        flat = [keras.layers.Flatten()(t(ids)) for t, ids in zip(tables, inputs, strict=True)]
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(flat)))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.optimizer.build(model.trainable_variables)
    tables[0].load_rows(np.arange(10**6, 10**6 + ROWS), np.ones((ROWS, 4), "float32"))
    return model, tables


class KeepStates(keras.callbacks.Callback):
    """Keeps the state of the model at each end of an epoch, and begins each by removing a row."""

    def __init__(self, tables):
        super().__init__()
        self.tables, self.states = tables, []

    def on_epoch_begin(self, epoch, logs=None):
        self.tables[0].evict([10**6 + epoch])
        self.tables[0].load_rows([10**6 + 100 + epoch], np.full((1, 4), epoch, "float32"))

    def on_epoch_end(self, epoch, logs=None):
        self.states.append(state_of(self.model))


def trained(strategy, path, epochs=EPOCHS, **options):
    """Trains with a backup after each epoch; returns the states at these."""
    model, tables = made(strategy)
    keep = KeepStates(tables)
    options = {"delta": True, "delete_checkpoint": False, "interval_s": 10**6, **options}
    model.fit(
        [IDS] * 3,
        np.ones(len(IDS)),
        batch_size=BATCH_SIZE,
        steps_per_epoch=STEPS,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[keep, kerasps.BackupAndRestore(path, **options)],
    )
    assert tables[1].figures()["evicted"] > 0
    return keep.states


@pytest.fixture(scope="module")
def model(strategy):
    return made(strategy)[0]


def restored(model, path):
    """Returns the state of a model after it was restored, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = BackupStore(path, model).restore([])
    state = None if record is None else state_of(model)
    return state, [str(each.message) for each in caught]


@pytest.fixture(scope="module")
def chain(strategy, tmp_path_factory):
    """The directory of a chain, and the states at its backups."""
    path = tmp_path_factory.mktemp("chain") / "backups"
    return path, trained(strategy, path)


def test_base_and_deltas_are_the_whole(model, chain):
    path, states = chain
    last = next(BackupDirectory(path).backups())
    deltas = last.chain[1:]
    assert len(deltas) == EPOCHS - 1
    assert any(len(ids) for each in deltas for ids in each.removed.values())
    state, told = restored(model, path)
    assert differences(state, states[-1]) == []
    assert not told


def test_a_new_base_comes_in_time(strategy, model, tmp_path):
    path = tmp_path / "backups"
    states = trained(strategy, path, full_every=1, double_checkpoint=True)
    backups = list(BackupDirectory(path).backups())
    # Bases are 1, 3 and 5; the chains of the last two stay.
    assert [backup.number for backup in backups] == [5, 4, 3]
    assert [len(backup.chain) for backup in backups] == [1, 2, 1]
    state, _ = restored(model, path)
    assert differences(state, states[-1]) == []


def damage_byte(path, name):
    file = next(path.glob(name))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def truncate(path, name):
    file = next(path.glob(name))
    file.write_bytes(file.read_bytes()[:-3])
    return file


def remove(path, name):
    file = next(path.glob(name))
    file.unlink()
    return file


def swap(path, name):
    """Swaps a file with that of the backup before."""
    file = next(path.glob(name))
    other = path / str(file.relative_to(path)).replace("000003", "000002")
    mine, its = file.read_bytes(), other.read_bytes()
    file.write_bytes(its)
    other.write_bytes(mine)
    return other


def forge(path, name):
    """Changes a manifest in a way that its checksum is right."""
    file = path / name
    written = json.loads(file.read_text())
    written["content"]["record"]["epoch"] = 77
    written["sha256"] = backup_files._digest(written["content"])
    file.write_text(json.dumps(written))
    return file


@pytest.mark.parametrize(
    ("harm", "name", "expected"),
    [
        (damage_byte, "backup-000003/100000.data-*", 2),
        (damage_byte, "backup-000003/arrays.npz", 2),
        (damage_byte, "backup-000003.json", 2),
        (truncate, "backup-000003/100000.data-*", 2),
        (remove, "backup-000003/100000.index", 2),
        (remove, "backup-000003.json", 2),
        (swap, "backup-000003/100000.data-*", 1),
        (swap, "backup-000003.json", 1),
        (forge, "backup-000003.json", 3),
        (remove, "backup-000001.json", 0),
    ],
)
def test_a_damaged_file_is_named_and_the_good_part_is_used(
    model, chain, tmp_path, harm, name, expected
):
    path = tmp_path / "backups"
    shutil.copytree(chain[0], path)
    file = harm(path, name)
    state, told = restored(model, path)
    if expected:
        assert differences(state, chain[1][expected - 1]) == []
    else:
        assert state is None
    assert any(str(file).split(".data-")[0] in text for text in told), told
    # Each backup that cannot be used has its warning.
    later = EPOCHS - expected - ("000003.json" in name and harm is remove)
    assert sum("is damaged and is not used" in text for text in told) >= later - 1


def test_a_delta_of_another_training_is_refused(strategy, model, chain, tmp_path):
    trained(strategy, tmp_path / "other", 3)
    path = tmp_path / "backups"
    shutil.copytree(chain[0], path)
    for name in ("backup-000003.json", "backup-000003"):
        source = tmp_path / "other" / name
        if source.is_dir():
            shutil.rmtree(path / name)
            shutil.copytree(source, path / name)
        else:
            shutil.copy(source, path / name)
    state, told = restored(model, path)
    assert differences(state, chain[1][1]) == []
    assert any("backup-000003.json is a delta on another backup than" in text for text in told)
