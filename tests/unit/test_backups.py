"""What a backup consists of, as far as no cluster is needed: files, records, and who knows what."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import threading
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.inputs import as_input
from kerasps.saving.backup_files import BackupDirectory
from kerasps.tools.cli.main import main
from kerasps.training.backup.backup_callback import backup_interval
from kerasps.training.backup.callback_states import restore_states, states_of
from kerasps.training.contract.preemption import PreemptionNotice
from kerasps.training.epoch.epoch_events import SplitPosition
from kerasps.training.epoch.splits import SplitLedger
from kerasps.training.loop.position import LoopPosition, Position

RECORD = {
    "number": 3,
    "nothing": None,
    "list": [1.5, np.float32(0.1), [np.arange(6, dtype=np.int64).reshape(2, 3)]],
    "bfloat16": np.array([1.5, -2], tf.bfloat16.as_numpy_dtype),
    "scalar": np.array(7, np.int32),
}


def write(path, record=RECORD, keep=1, content=b"values"):
    """Writes a backup whose only file is not one of TensorFlow's."""
    directory = BackupDirectory(path, keep)
    number, files = directory.begin()
    Path(files, "0000.index").write_bytes(content)
    directory.commit(number, record, [{"key": "a", "file": "0000"}], {"a": {"shape": [2]}})
    return number


def numbers(path):
    return [backup.number for backup in BackupDirectory(path).backups()]


def test_a_record_comes_back_as_it_was(tmp_path):
    write(tmp_path)
    (backup,) = BackupDirectory(tmp_path).backups()
    assert backup.pieces == [{"key": "a", "file": "0000"}]
    assert backup.specs == {"a": {"shape": [2]}}
    assert backup.record["number"] == 3
    assert backup.record["nothing"] is None
    for name in ("bfloat16", "scalar"):
        assert backup.record[name].dtype == RECORD[name].dtype
        np.testing.assert_array_equal(backup.record[name], RECORD[name])
    first, second, (third,) = backup.record["list"]
    assert (first, second) == (1.5, np.float32(0.1))
    np.testing.assert_array_equal(third, [[0, 1, 2], [3, 4, 5]])
    assert third.dtype == np.int64


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_backups_are_kept(tmp_path, keep):
    for _ in range(4):
        write(tmp_path, keep=keep)
    assert numbers(tmp_path) == [4, 3][:keep]
    assert len(list(tmp_path.iterdir())) == 2 * keep


def test_what_a_killed_process_left_is_no_backup_and_is_removed(tmp_path):
    write(tmp_path)
    # Killed while the ps write, and just before the manifest got its name.
    for number in (2, 3):
        (tmp_path / f"backup-{number:06d}").mkdir()
    (tmp_path / "backup-000003.json.partial").write_text("{}")
    (tmp_path / "notes.txt").write_text("not ours")
    assert numbers(tmp_path) == [1]
    assert write(tmp_path) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "backup-000004",
        "backup-000004.json",
        "notes.txt",
    ]


def test_what_kerasps_did_not_make_stays(tmp_path):
    write(tmp_path)
    # A copy under another name, such as a date, is neither a later backup nor removed.
    for name in ("backup-20251128", "backup-251128"):
        shutil.copytree(tmp_path / "backup-000001", tmp_path / name)
        shutil.copy(tmp_path / "backup-000001.json", tmp_path / f"{name}.json")
    # A directory of the user's, a link, and a file among those of a backup.
    (tmp_path / "backup-000002").mkdir()
    (tmp_path / "backup-000002" / "0000.index").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "0000.index").write_text("mine")
    (tmp_path / "backup-000003").symlink_to("elsewhere")
    (tmp_path / "backup-000001" / "notes.txt").write_text("mine")
    before = {path for path in tmp_path.rglob("*") if "backup-000001" not in str(path)}
    assert numbers(tmp_path) == [1]
    last = write(tmp_path)
    assert numbers(tmp_path) == [last]
    assert before <= set(tmp_path.rglob("*"))
    assert [path.name for path in (tmp_path / "backup-000001").iterdir()] == ["notes.txt"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def change(path):
    path.write_text(path.read_text().replace('"shape": [2]', '"shape": [3]'))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("backup-000002.json", cut, "Unterminated|Expecting"),
        ("backup-000002.json", change, "the checksum of the manifest is wrong"),
        ("backup-000002/0000.index", cut, "has 3 bytes, and had 6"),
        ("backup-000002/0000.index", os.remove, "0000.index is missing"),
        ("backup-000002/arrays.npz", cut, "bytes, and had"),
    ],
)
def test_a_damaged_backup_is_refused_by_name(tmp_path, name, damage, words):
    for _ in range(2):
        write(tmp_path, keep=2)
    damage(tmp_path / name)
    with pytest.warns(UserWarning, match=rf"backup-000002\.json is damaged.*({words})"):
        assert numbers(tmp_path) == [1]


@pytest.mark.parametrize("name", ["backup-000002.json", "backup-000002/arrays.npz"])
def test_any_changed_byte_leads_to_the_backup_before(tmp_path, name):
    """The record is that of the last backup or of the one before, whole."""
    write(tmp_path, {"number": 1}, keep=2)
    write(tmp_path, keep=2)
    path = tmp_path / name
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.warns(UserWarning, match=r"backup-000002\.json is damaged"):
            (backup,) = BackupDirectory(tmp_path).backups()
        assert backup.record == {"number": 1}


@pytest.mark.parametrize("name", ["0000.index", "0000.data-00000-of-00001"])
def test_any_changed_byte_of_what_a_ps_wrote_is_noticed(tmp_path, name):
    """An index by its checksum in the manifest; values when TensorFlow reads them."""
    directory = BackupDirectory(tmp_path)
    number, files = directory.begin()
    values = tf.range(100.0)
    tf.raw_ops.SaveV2(
        prefix=f"{files}/0000", tensor_names=["0"], shape_and_slices=[""], tensors=[values]
    )
    directory.commit(number, RECORD, [{"key": "a", "file": "0000"}], {"a": {"shape": [100]}})
    path = Path(files, name)
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        if name.endswith(".index"):
            with pytest.warns(UserWarning, match="the checksum of .*0000.index is wrong"):
                assert not numbers(tmp_path)
        else:
            with pytest.raises(tf.errors.DataLossError):
                tf.raw_ops.RestoreV2(
                    prefix=f"{files}/0000",
                    tensor_names=["0"],
                    shape_and_slices=[""],
                    dtypes=[tf.float32],
                )


def test_a_damaged_backup_of_an_earlier_version_is_refused_by_name(tmp_path):
    """Its manifest has no checksums of files."""
    write(tmp_path)
    manifest = tmp_path / "backup-000001.json"
    content = json.loads(manifest.read_text())["content"]
    del content["checksums"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({"sha256": digest, "content": content}))
    assert numbers(tmp_path) == [1]
    path = tmp_path / "backup-000001" / "arrays.npz"
    written = path.read_bytes()
    for place in range(len(written)):
        changed = bytearray(written)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            for backup in BackupDirectory(tmp_path).backups():
                np.testing.assert_equal(backup.record["scalar"], RECORD["scalar"])


def test_a_backup_without_what_the_ps_wrote_is_not_completed(tmp_path):
    write(tmp_path)
    directory = BackupDirectory(tmp_path)
    number, _ = directory.begin()
    with pytest.raises(OSError, match=r"the ps did not write 0000\.index"):
        directory.commit(number, {}, [{"key": "a", "file": "0000"}], {})
    directory.discard(number)
    assert numbers(tmp_path) == [1]


def position(**changes):
    loop = {
        "steps": 3,
        "metrics": [np.ones(2)],
        "logs": {},
        "first_step": 10,
        "next_step": 13,
        "seeds": [],
        "splits": [SplitPosition(0, 2), SplitPosition(1, 1, 4)],
        "input": {"key": [4]},
    }
    return Position(
        epoch=2,
        loop=LoopPosition(**{**loop, **changes}),
        validation=None,
        seed_states=[],
        global_seed_state=None,
        callbacks=[None],
    )


def test_a_position_is_a_record_of_named_fields(tmp_path):
    write(tmp_path, position().to_record())
    (backup,) = BackupDirectory(tmp_path).backups()
    again = Position.from_record(backup.record)
    assert (again.epoch, again.loop.splits, again.loop.input) == (
        2,
        [SplitPosition(0, 2), SplitPosition(1, 1, 4)],
        {"key": [4]},
    )
    np.testing.assert_array_equal(again.loop.metrics, [[1, 1]])
    with pytest.raises(ValueError, match=r"a record of version 1\. Received: version 9"):
        Position.from_record({**position().to_record(), "version": 9})


def test_splits_are_opened_behind_what_was_confirmed():
    splits = SplitLedger(2, [SplitPosition(0, 5), SplitPosition(1)])
    assert [splits[split].confirmed for split in range(2)] == [5, 0]
    assert splits[0].confirm(2) == 5
    assert [SplitLedger(2)[split].confirmed for split in range(2)] == [0, 0]


def test_callbacks_get_back_what_they_knew_and_no_more():
    def callbacks():
        return [
            keras.callbacks.History(),
            keras.callbacks.EarlyStopping(patience=3),
            keras.callbacks.ModelCheckpoint("a.keras", save_best_only=True),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        ]

    before, after = callbacks(), callbacks()
    before[3]._ema_weights_in_model = True
    before[1].on_train_begin()
    before[1].wait, before[1].best, before[1].patience = 2, np.float32(0.25), 9
    before[2].best = 0.5
    states = states_of(before)
    json.dumps(states)
    after[1].on_train_begin()
    restore_states(after, states)
    assert (after[1].wait, after[1].best, after[1].patience) == (2, 0.25, 3)
    assert after[2].best == 0.5
    assert after[3]._ema_weights_in_model
    restore_states([keras.callbacks.History(), *callbacks()], states)  # a list that has changed


@pytest.mark.parametrize(("text", "seconds"), [(None, 60), ("", 60), ("0", None), ("2.5", 2.5)])
def test_the_interval_is_a_minute_unless_the_environment_says_another(monkeypatch, text, seconds):
    monkeypatch.delenv("KERASPS_BACKUP_INTERVAL", raising=False)
    if text is not None:
        monkeypatch.setenv("KERASPS_BACKUP_INTERVAL", text)
    assert backup_interval() == seconds


@pytest.mark.parametrize(("interval", "error"), [("1", TypeError), (0, ValueError)])
def test_an_interval_is_a_time(interval, error):
    with pytest.raises(error, match=f"`interval_s` is not a time.*interval_s={interval!r}"):
        kerasps.BackupAndRestore("backup", interval_s=interval)


# Inputs


def elements(given, split=0, skip=0):
    dataset = given.open(split, skip)
    return [np.asarray(x).ravel().tolist() for x, *_ in dataset.iterator]


def whole_dataset():
    return as_input(tf.data.Dataset.range(40).shuffle(40).batch(4).map(lambda x: (x, x)), 2)


def arrays():
    return as_input(np.arange(40.0)[:, None], 2, y=np.arange(40.0), batch_size=4, shuffle=True)


@pytest.mark.parametrize("make", [whole_dataset, arrays])
def test_a_pass_goes_on_in_its_order_in_another_input(make):
    before, after = make(), make()
    before.start_pass(0, must_end=True)
    before.start_pass(1, must_end=True)
    state = json.loads(json.dumps(before.position(in_epoch=True)))
    expected = elements(before)
    batches = expected + elements(before, 1)
    assert sorted(x for batch in batches for x in batch) == list(range(40))
    after.resume_pass(state, [3, 0], must_end=True)
    assert elements(after, 0, 3) == expected[3:]
    for later in (before, after):
        later.start_pass(2, must_end=True)
    assert elements(after) == elements(before)
    again = make()
    again.resume_order(state, passes_to_repeat=1)
    again.start_pass(1, must_end=True)
    assert elements(again) == expected


def test_an_endless_pass_goes_on_where_it_has_an_order():
    def ordered():
        return tf.data.Dataset.range(5).repeat().batch(1).map(lambda x: (x, x))

    given = as_input(kerasps.DatasetCreator(lambda context: ordered()), 1, steps=3, goes_on=True)
    given.start_pass(0, must_end=False)
    state = given.position(in_epoch=True)
    given.resume_pass(state, [7], must_end=False)
    (first, _) = next(given.open(0, 7).iterator)
    assert first.numpy() == [2]
    # For a worker that comes back, it begins anew.
    (first, _) = next(given.open(0, 8).iterator)
    assert first.numpy() == [0]


class Batches(keras.utils.PyDataset):
    """Shuffled by Keras, and once more by itself, after each epoch."""

    def __init__(self):
        super().__init__()
        self.order, self.random = list(range(10)), random.Random(5)

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        return np.array([self.order[index]]), np.array([0])

    def on_epoch_end(self):
        self.random.shuffle(self.order)


def read(given, count):
    found = given.next_batches(count).batches
    return [int(x.numpy()[0]) for x, _ in found]


@pytest.mark.filterwarnings("ignore:.*lives in this process")
def test_what_this_process_reads_goes_on_behind_what_was_read():
    def make():
        return as_input(Batches(), 2, shuffle=True)

    before = make()
    for epoch in range(2):
        before.start_pass(epoch, must_end=True)
        before.on_epoch_begin()
        first = read(before, 4)
        state = json.loads(json.dumps(before.position(in_epoch=True)))
        rest = read(before, 10)
        assert sorted(first + rest) == list(range(10))
        before.on_epoch_end()
        random.seed(99)  # another process draws other numbers until it is put where this one was
        after = make()
        after.resume_pass(state, [], must_end=True)
        after.on_epoch_begin()
        assert read(after, 10) == rest


# SIGTERM


def test_a_notice_is_answered_later_and_the_handler_put_back():
    notice = PreemptionNotice()
    notice.install()
    signal.raise_signal(signal.SIGTERM)
    assert notice.is_given
    assert notice.ends_process
    notice.uninstall()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(SystemExit) as ended:
        notice.answer()
    assert ended.value.code == 143
    assert not notice.is_given


def test_a_handler_that_was_set_meanwhile_stays():
    notice = PreemptionNotice()
    notice.install()
    signal.signal(signal.SIGTERM, handler := lambda number, frame: None)
    try:
        notice.uninstall()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_signal_that_is_ignored_stays_so():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        notice = PreemptionNotice()
        notice.install()
        signal.raise_signal(signal.SIGTERM)
        assert not notice.is_given
        notice.uninstall()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_another_thread_sets_no_handler():
    notice = PreemptionNotice()
    thread = threading.Thread(target=notice.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("full_every", [0, -3, "100", None, 1.5])
def test_a_number_of_deltas_that_cannot_be_is_refused(full_every):
    with pytest.raises((TypeError, ValueError), match="`full_every` is not a number of backups"):
        kerasps.BackupAndRestore("backup", delta=True, full_every=full_every)


def write_chain(path):
    """Writes a whole backup and two deltas on it, each with a file of TensorFlow's."""
    directory, backups = BackupDirectory(path), []
    for step in range(3):
        number, files = directory.begin()
        tf.raw_ops.SaveV2(
            prefix=f"{files}/0000",
            tensor_names=["0"],
            shape_and_slices=[""],
            tensors=[tf.range(100) + step],
        )
        backups.append(
            directory.commit(
                number,
                {"epoch": 1, "loop": {"steps": step}},
                [{"key": "a", "file": "0000"}],
                {"a": {"shape": [100]}},
                removed={"a": np.arange(step)} if step else None,
                previous=backups[-1] if step else None,
            )
        )


def test_a_chain_stays_as_long_as_a_delta_is_on_it(tmp_path):
    write_chain(tmp_path)
    last = next(BackupDirectory(tmp_path).backups())
    assert [backup.number for backup in last.chain] == [1, 2, 3]
    assert [len(backup.removed.get("a", ())) for backup in last.chain] == [0, 1, 2]
    assert write(tmp_path) == 4
    assert numbers(tmp_path) == [4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "backup-000004",
        "backup-000004.json",
    ]


def test_the_command_lists_backups(tmp_path, capsys):
    write_chain(tmp_path)
    assert main(["backups", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        [f"{n}", "2", f"{n - 1}"] for n in (3, 2, 1)
    ]
    assert ["delta on 2" in lines[1], "delta on 1" in lines[2], "whole" in lines[3]] == [True] * 3
    # The reader of TensorFlow finds a changed value by its checksum.
    values = next((tmp_path / "backup-000002").glob("0000.data*"))
    values.write_bytes(bytes([values.read_bytes()[0] ^ 1]) + values.read_bytes()[1:])
    assert main(["backups", "--json", str(tmp_path)]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["number"] for row in rows if row["problem"] is None] == [1]
    assert all(f"{tmp_path}/backup-000002/0000" in row["problem"] for row in rows[:2])


def test_the_command_lists_no_backups(tmp_path, capsys):
    assert main(["backups", str(tmp_path / "none")]) == 0
    assert capsys.readouterr().out.startswith("There are no backups in ")
