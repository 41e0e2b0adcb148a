"""`BackupAndRestore` with two workers: `fit` goes on at the step of the last backup.

Processes that are killed are for tests/processes/test_backups.py; here `fit` is interrupted.
"""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.saving.backup_files import BackupDirectory
from kerasps.variables.rows.sharding import LAYOUTS
from support.matrix import with_matrix
from support.models import counting_model, ids_data
from support.process_checks import wait_for

NUM_EXAMPLES, BATCH_SIZE, EPOCHS = 800, 4, 2
STEPS = NUM_EXAMPLES // BATCH_SIZE
X, Y = ids_data(NUM_EXAMPLES)
EXACT = {
    "batches": STEPS,
    "examples": NUM_EXAMPLES,
    "ids": int(Y.sum()),
    "squares": int((Y.astype("int64") ** 2).sum()),
}
IDS = ("ids", "squares")


def arrays():
    return {"x": X, "y": Y, "batch_size": BATCH_SIZE}


def of_unknown_length():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(100).filter(lambda *_: True)
    return {"x": dataset.batch(BATCH_SIZE)}


def endless():
    def dataset_fn(context):
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(BATCH_SIZE)
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)

    return {"x": kerasps.DatasetCreator(dataset_fn), "steps_per_epoch": STEPS}


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        return X[rows], Y[rows]


def py_dataset():
    return {"x": Batches()}


class At(keras.callbacks.Callback):
    """Does something once, at the end of a batch of an epoch; notes what it is told of."""

    def __init__(self, epoch=None, batch=0, act=lambda: None):
        super().__init__()
        self.at, self.act = (epoch, batch), act
        self.epochs, self.batches = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        if self.epochs[-1] == self.at[0] and batch >= self.at[1]:
            self.at = (None, 0)
            self.act()


def interrupt():
    raise KeyboardInterrupt


def terminate():
    signal.raise_signal(signal.SIGTERM)


class Pair:
    """Two models that are made alike: of a process that is lost, and of the one that comes after.

    What they know before is of no account, for the second gets what the first was.
    """

    def __init__(self, strategy):
        self.first, self.second = counting_model(strategy, 5), counting_model(strategy, 5)
        self._before = 0

    @property
    def updates(self):
        """How many there were in all."""
        return num_updates(self.second) - self._before

    def begin(self, data, *callbacks, **arguments):
        """Trains the first model; returns the logs by epoch."""
        self._before = num_updates(self.first)
        return fit(self.first, data, *callbacks, **arguments)

    def interrupt(self, act, data, path, *callbacks, **arguments):
        """Trains the first model until `act` ends it, in the last epoch."""
        act_there = At(EPOCHS - 1, 120, act)
        with pytest.raises(KeyboardInterrupt):
            self.begin(data, often(path, **arguments), act_there, *callbacks)

    def go_on(self, data, *callbacks, **arguments):
        """Trains the second model; returns the logs by epoch."""
        return fit(self.second, data, *callbacks, **arguments)


@pytest.fixture(scope="module")
def pair(strategy):
    return Pair(strategy)


def fit(model, data, *callbacks, **arguments):
    return model.fit(
        **data(), epochs=EPOCHS, verbose=0, callbacks=list(callbacks), **arguments
    ).history


def last(history, names=EXACT):
    return {name: history[name][-1] for name in names}


def num_updates(model):
    return int(model.optimizer.iterations.numpy())


def often(path, **arguments):
    return kerasps.BackupAndRestore(path, interval_s=0.02, **arguments)


def record_of(path):
    return next(BackupDirectory(path).backups()).record


@pytest.mark.filterwarnings("ignore:.*lives in this process")
@pytest.mark.parametrize(
    "data",
    with_matrix([arrays, of_unknown_length, endless, py_dataset], at_length=[arrays, py_dataset]),
)
def test_an_epoch_goes_on_at_the_step_of_the_backup(pair, tmp_path, data):
    path, told = tmp_path / "backup", At()
    pair.interrupt(interrupt, data, path)
    record = record_of(path)
    assert record["epoch"] == EPOCHS - 1
    done = record["loop"]["steps"]
    assert 0 < done <= STEPS
    history = pair.go_on(data, often(path), told)
    assert pair.updates == EPOCHS * STEPS
    exact = [name for name in EXACT if data is not endless or name not in IDS]
    assert last(history, exact) == {name: EXACT[name] for name in exact}
    assert told.epochs == [EPOCHS - 1]
    assert told.batches[0] >= done
    assert told.batches[-1] == STEPS - 1
    assert not path.exists(), "a training that ended well deletes its backups"


def test_a_backup_between_epochs_begins_with_the_next_one(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("KERASPS_BACKUP_INTERVAL", "0")
    path, told = tmp_path / "backup", At()
    with pytest.raises(KeyboardInterrupt):
        pair.begin(arrays, keras.callbacks.BackupAndRestore(path), At(1, 20, interrupt))
    assert record_of(path)["epoch"] == 1
    assert record_of(path)["loop"]["steps"] == 0
    history = pair.go_on(arrays, keras.callbacks.BackupAndRestore(path), told)
    assert told.epochs == [1]
    assert pair.updates == EPOCHS * STEPS
    assert last(history) == EXACT
    # The next `fit` of the process begins with its first epoch.
    pair.go_on(arrays, keras.callbacks.BackupAndRestore(path), told)
    assert told.epochs == [1, *range(EPOCHS)]


@pytest.mark.filterwarnings("ignore:.*lives in this process")
@pytest.mark.parametrize(
    "data",
    with_matrix([arrays, of_unknown_length, endless, py_dataset], at_length=[arrays, py_dataset]),
)
def test_no_backup_is_made_where_nothing_was_done(pair, tmp_path, data):
    path = tmp_path / "backup"
    backup = keras.callbacks.BackupAndRestore(path, save_freq=False)
    with pytest.raises(SystemExit):
        pair.begin(data, backup, At(0, STEPS - 1, terminate))
    assert (record_of(path)["epoch"], record_of(path)["loop"]["steps"]) == (0, STEPS)
    # Backups are due before workers have said that the epoch has no more data.
    always = kerasps.BackupAndRestore(path, interval_s=1e-3, delete_checkpoint=False)
    history = pair.go_on(data, always)
    assert pair.updates == EPOCHS * STEPS
    exact = [name for name in EXACT if data is not endless or name not in IDS]
    assert last(history, exact) == {name: EXACT[name] for name in exact}
    executions = STEPS // 5
    assert next(BackupDirectory(path).backups()).number < 1 + executions + EPOCHS + 1


def test_the_time_between_backups_comes_from_the_environment(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("KERASPS_BACKUP_INTERVAL", "0.02")
    path = tmp_path / "backup"
    with pytest.raises(KeyboardInterrupt):
        pair.begin(arrays, keras.callbacks.BackupAndRestore(path), At(0, 150, interrupt))
    assert 0 < record_of(path)["loop"]["steps"] < STEPS
    monkeypatch.setenv("KERASPS_BACKUP_INTERVAL", "often")
    with pytest.raises(ValueError, match="KERASPS_BACKUP_INTERVAL is not a time limit"):
        pair.begin(arrays, keras.callbacks.BackupAndRestore(path))


# SIGTERM


def test_sigterm_backs_up_and_ends_the_process(pair, tmp_path):
    path, told = tmp_path / "backup", At()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    backup = keras.callbacks.BackupAndRestore(path, save_freq=False)
    with pytest.raises(SystemExit) as ended:
        pair.begin(arrays, backup, At(1, 100, terminate))
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    record = record_of(path)
    assert record["epoch"] == 1
    assert record["loop"]["steps"] > 100
    history = pair.go_on(arrays, keras.callbacks.BackupAndRestore(path), told)
    assert told.epochs == [1]
    assert pair.updates == EPOCHS * STEPS
    assert last(history) == EXACT


def test_a_handler_of_the_users_decides_what_follows_a_backup(pair, tmp_path):
    path, found = tmp_path / "backup", []

    def handler(number, frame):
        found.append((number, record_of(path)["epoch"]))

    def look():
        asked.extend(path.glob("*"))

    before, asked = signal.signal(signal.SIGTERM, handler), []
    try:
        backup = keras.callbacks.BackupAndRestore(path, save_freq=False)
        history = pair.begin(arrays, backup, At(1, 50, look), At(1, 100, terminate))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [(signal.SIGTERM, 1)]
    assert last(history) == EXACT
    assert asked == [], "`save_freq=False` asks for none"


def test_without_the_callback_sigterm_is_not_touched(pair):
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(signal.getsignal(signal.SIGTERM))
    )
    pair.first.fit(X[:8], Y[:8], verbose=0, callbacks=[look])
    assert seen == [signal.SIG_DFL]


def test_sigterm_within_a_validation_does_not_wait_for_it(pair, tmp_path):
    class InValidation(keras.callbacks.Callback):
        tested = 0

        def on_test_batch_end(self, batch, logs=None):
            self.tested += 1
            if self.tested == 3:
                terminate()

    path, in_validation = tmp_path / "backup", InValidation()
    validation = {"validation_data": (X[:300], Y[:300]), "validation_batch_size": 1}
    backup = keras.callbacks.BackupAndRestore(path, save_freq=False)
    with pytest.raises(SystemExit):
        pair.begin(arrays, backup, in_validation, **validation)
    assert in_validation.tested < 300 / 5 - 10
    record = record_of(path)
    assert (record["epoch"], record["loop"]["steps"]) == (0, STEPS)
    history = pair.go_on(arrays, often(path), **validation)
    assert pair.updates == EPOCHS * STEPS
    assert {name: history[name] for name in EXACT} == {n: [EXACT[n]] * EPOCHS for n in EXACT}
    assert history["val_ids"] == [Y[:300].sum()] * EPOCHS


# What goes wrong


def test_a_write_error_is_a_warning_and_no_end_of_the_training(pair, strategy, tmp_path):
    path, left = tmp_path / "backup", []
    pids = children_that_are_ps(strategy)
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}

    def stop_writing():
        # The backup of the first epoch's end is made, and being written.
        wait_for(lambda: any(path.glob("*.json")), what="a backup")
        left.extend(path.glob("*.json"))
        # Writing fails as on a full disk, with another number of the error.
        for pid, (_, hard) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, hard))

    def write_again():
        for pid, limit in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

    # Three epochs end meanwhile. A backup waits for the one before: two at least have failed.
    data, epochs = arrays(), 5
    callbacks = [
        often(path, delete_checkpoint=False, double_checkpoint=True),
        At(1, 0, stop_writing),
        At(4, 0, write_again),
    ]
    try:
        with pytest.warns(UserWarning, match="could not be written.*File too large") as warned:
            history = pair.first.fit(**data, epochs=epochs, verbose=0, callbacks=callbacks).history
    finally:
        write_again()
    assert len(warned) >= 2, "it is repeated"
    assert left
    assert last(history) == EXACT
    assert record_of(path)["epoch"] == epochs, "later backups are made again"


def children_that_are_ps(strategy):
    """The processes of the ps, which this process has started."""
    children = Path("/proc/self/task").glob("*/children")
    pids = {int(pid) for path in children for pid in path.read_text().split()}
    # Each writes to a log of its own.
    found = [p for p in pids if Path(f"/proc/{p}/fd/1").readlink().name.startswith("ps-")]
    assert len(found) == strategy.num_ps
    return found


def test_a_damaged_backup_is_refused_by_name_and_the_one_before_is_used(pair, tmp_path):
    path = tmp_path / "backup"
    pair.interrupt(interrupt, arrays, path, double_checkpoint=True)
    newest, before = BackupDirectory(path).backups()
    assert before.number == newest.number - 1
    file = sorted(Path(newest.directory).glob("*.data*"))[0]
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.warns(UserWarning, match=f"backup-{newest.number:06d}.json is damaged"):
        history = pair.go_on(arrays, often(path))
    assert pair.updates == EPOCHS * STEPS
    assert last(history) == EXACT


def test_a_backup_of_another_model_is_refused(pair, strategy, tmp_path):
    path = tmp_path / "backup"
    pair.interrupt(interrupt, arrays, path)
    with strategy.scope():
        other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        other.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"another model.*Expected: variable model/0, .*\[2, 1\]"):
        fit(other, arrays, often(path))


def test_another_number_of_splits_begins_the_epoch_anew(pair, tmp_path):
    path = tmp_path / "backup"
    pair.interrupt(interrupt, arrays, path)
    # As if one more worker had read.
    change_record(path, lambda record: record["loop"]["splits"].append((2, 0, None)))
    done = record_of(path)["loop"]["steps"]
    with pytest.warns(UserWarning, match="was read in 3 parts, one per worker, and is read in 2"):
        history = pair.go_on(arrays, often(path))
    assert pair.updates == EPOCHS * STEPS + done
    assert last(history) == EXACT


def test_parts_of_splits_are_read_on(pair, tmp_path):
    path = tmp_path / "backup"
    pair.interrupt(interrupt, arrays, path)

    def divide(record):
        """As if a worker had joined, and another one."""
        splits = record["loop"]["splits"]
        for source, confirmed, end in list(splits):
            middle = (confirmed + end) // 2
            splits[source] = (source, confirmed, middle)
            splits.append((source, middle, end))

    change_record(path, divide)
    history = pair.go_on(arrays, often(path))
    assert pair.updates == EPOCHS * STEPS
    assert last(history) == EXACT


def change_record(path, change):
    """Changes what is written of where the training stands."""
    directory = BackupDirectory(path)
    backup = next(directory.backups())
    change(backup.record)
    for file in Path(backup.directory).glob("arrays*"):
        file.unlink()
    directory.commit(backup.number, backup.record, backup.pieces, backup.specs)


def test_where_the_ps_do_not_see_the_directory_the_coordinator_writes(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = "/proc/self/cwd/backup"  # for each process another one
    pair.interrupt(interrupt, arrays, path)
    assert list(Path(path).glob("*/*.index"))
    history = pair.go_on(arrays, often(path))
    assert pair.updates == EPOCHS * STEPS
    assert last(history) == EXACT


# What is restored


def with_table(strategy, seed):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(4001, 8),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.1), "mse", steps_per_execution=5)
    return model


def values(model):
    return [np.asarray(v) for v in [*model.trainable_variables, *model.optimizer.variables]]


@pytest.mark.parametrize(
    ("layout", "part_bytes"),
    with_matrix([("mod", 64 << 20), ("div", 20_000)], at_length=[("mod", 64 << 20)]),
)
def test_a_table_in_shards_is_restored_bit_for_bit(
    strategy, tmp_path, monkeypatch, layout, part_bytes
):
    monkeypatch.setattr("kerasps.saving.variable_copies.PART_BYTES", part_bytes)
    path = tmp_path / "backup"
    ids = np.random.default_rng(0).integers(0, 4001, (400, 3)).astype("int32")
    y = np.ones((400, 1), "float32")
    first = with_table(strategy, 1)
    # It was written in rows that are dealt out in turn.
    monkeypatch.setattr(strategy.extended, "_shard_layout", layout)
    second = with_table(strategy, 2)
    assert type(second.layers[0].embeddings.sharding) is LAYOUTS[layout]
    assert len(first.layers[0].embeddings.shards) == 2
    arguments = {"epochs": 1, "verbose": 0}
    kept = keras.callbacks.BackupAndRestore(path, delete_checkpoint=False)
    first.fit(ids, y, callbacks=[kept], **arguments)
    second.fit(ids, y, callbacks=[keras.callbacks.BackupAndRestore(path)], **arguments)
    for ours, theirs in zip(values(second), values(first), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_callbacks_of_keras_know_what_they_knew(pair, tmp_path):
    path = tmp_path / "backup"

    def callbacks():
        return [
            keras.callbacks.EarlyStopping("loss", patience=9, mode="max"),
            keras.callbacks.ReduceLROnPlateau("loss", patience=9, mode="max"),
            keras.callbacks.ModelCheckpoint(
                tmp_path / "best.weights.h5", "loss", save_best_only=True, save_weights_only=True
            ),
        ]

    def known(stopping, plateau, checkpoint):
        return stopping.wait, stopping.best, plateau.wait, plateau.best, checkpoint.best

    before, after, seen = callbacks(), callbacks(), []
    pair.interrupt(interrupt, arrays, path, *before)
    look = At(EPOCHS - 1, 0, lambda: seen.append(known(*after)))
    pair.go_on(arrays, often(path), look, *after)
    assert seen == [known(*before)]
    assert None not in seen[0]
