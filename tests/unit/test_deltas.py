"""Files of deltas: what a reader gets, and which files it refuses by name."""

from __future__ import annotations

import itertools
import json
import shutil

import keras
import ml_dtypes
import numpy as np
import pytest

import kerasps
from kerasps.serving.manifests import file_name, manifest_name, sealed
from kerasps.serving.writer import DeltaWriter, TableContent
from support.documentation import code_blocks, page_text

ENTRY = {"width": 2, "dtype": "float32", "default": {"distribution": "constant", "first": 0.0}}


def rows_of(ids, value):
    return np.asarray(ids)[:, None] * 10.0 + np.full((len(ids), 2), value, np.float32)


def content(ids, value, removed=(), is_whole=False):
    ids = np.array(ids, np.int64)
    pieces = iter([(ids[:1], rows_of(ids[:1], value)), (ids[1:], rows_of(ids[1:], value))])
    return TableContent(pieces, np.array(removed, np.int64), is_whole, ENTRY)


def write(writer, value, ids, removed=(), is_base=False):
    writer.write(
        is_base=is_base,
        read_at=100.0 + value,
        step=value,
        tables={"items/table": content(ids, value, removed, is_base)},
        weights={"dense/kernel": np.full((3, 1), value, np.float32)},
        since={"items/table": [value]},
    )


def chain(directory, values=(1, 2, 3)):
    """A chain in which each delta sets id 7 and a new id, and removes the one before."""
    writer = DeltaWriter(directory, keep=2)
    assert writer.go_on() is None
    assert writer.wants_base
    write(writer, values[0], [7, values[0]], is_base=True)
    for before, value in itertools.pairwise(values):
        write(writer, value, [7, value], removed=[before])
    return writer


def read(directory):
    state = kerasps.serving.State()
    for delta in kerasps.serving.DeltaReader(directory).new():
        state.apply(delta)
    return state


def apply_new(reader, state):
    for delta in reader.new():
        state.apply(delta)


def check(state, value):
    ids, rows = state.tables["items/table"]
    assert ids.tolist() == sorted({7, value})
    np.testing.assert_array_equal(rows, rows_of(ids, value))
    np.testing.assert_array_equal(state.weights["dense/kernel"], np.full((3, 1), value))


def test_a_base_and_its_deltas_are_read_in_turn(tmp_path):
    reader, state = kerasps.serving.DeltaReader(tmp_path / "deltas"), kerasps.serving.State()
    assert list(reader.new()) == []
    writer = chain(tmp_path / "deltas")
    deltas = list(reader.new())
    assert [(d.version, d.is_base, d.step) for d in deltas] == [
        (1, True, 1),
        (2, False, 2),
        (3, False, 3),
    ]
    for delta in deltas:
        state.apply(delta)
    check(state, 3)
    assert list(reader.new()) == []
    write(writer, 4, [7, 4], removed=[3])
    (delta,) = reader.new()
    assert (delta.version, delta.read_at, delta.name) == (4, 104.0, manifest_name(1, 3))
    assert delta.tables["items/table"].default == ENTRY["default"]


def test_a_delta_counts_as_read_when_the_next_one_is_asked_for(tmp_path):
    chain(tmp_path)
    reader = kerasps.serving.DeltaReader(tmp_path)
    for delta in reader.new():
        if delta.version == 2:
            break  # such as an error of the one who applies it
    assert [delta.version for delta in reader.new()] == [2, 3]


def test_a_writer_goes_on_where_another_one_was(tmp_path):
    chain(tmp_path)
    writer = DeltaWriter(tmp_path, keep=2)
    assert writer.go_on() == {"items/table": [3]}
    assert not writer.wants_base
    write(writer, 4, [7, 4], removed=[3])
    check(read(tmp_path), 4)
    assert read(tmp_path).version == 4


def test_readers_go_over_to_a_new_chain_and_old_ones_are_removed(tmp_path):
    writer = chain(tmp_path)
    reader = kerasps.serving.DeltaReader(tmp_path)
    list(reader.new())
    for value in (4, 5, 6):
        write(writer, value, [7, value], is_base=True)
    assert [(d.version, d.is_base) for d in reader.new()] == [(6, True)]
    names = {path.name[:6] for path in tmp_path.iterdir()}
    assert names == {"000003", "000004"}
    check(read(tmp_path), 6)


def test_a_long_chain_wants_a_base(tmp_path):
    writer = chain(tmp_path)
    for value in range(4, 102):
        assert not writer.wants_base
        write(writer, value, [7, value])
    assert writer.wants_base


def test_rows_are_rounded_and_weights_are_not(tmp_path):
    writer = DeltaWriter(tmp_path, keep=1, row_dtype=ml_dtypes.bfloat16)
    writer.go_on()
    ids, rows = np.array([1]), np.array([[1.005, 3.14159]], np.float32)
    writer.write(
        is_base=True,
        read_at=1.0,
        step=1,
        tables={"t": TableContent(iter([(ids, rows)]), np.zeros(0, np.int64), True, ENTRY)},
        weights={"w": rows, "number": np.array(3, np.int64)},
        since={},
    )
    (delta,) = kerasps.serving.DeltaReader(tmp_path).new()
    assert delta.tables["t"].rows.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(delta.tables["t"].rows, rows.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(delta.weights["w"], rows)
    assert delta.weights["number"] == 3


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def swap(path):
    other = path.with_name(path.name.replace("000002", "000001"))
    spare = path.with_name("spare")
    path.rename(spare)
    other.rename(path)
    spare.rename(other)


def foreign(path):
    chain(path.parent / "other")
    for other in (path.parent / "other").glob(f"{path.name[:13]}*"):
        shutil.copy(other, path.parent)


@pytest.mark.parametrize("kind", ["manifest", "file"])
@pytest.mark.parametrize("damage", [flip, halve, swap, foreign, lambda path: path.unlink()])
def test_a_wrong_file_is_named_and_nothing_of_it_is_read(tmp_path, damage, kind):
    chain(tmp_path, (1, 2, 3, 4))
    name = manifest_name(1, 2) if kind == "manifest" else file_name(1, 2, 0)
    damage(tmp_path / name)
    reader, state = kerasps.serving.DeltaReader(tmp_path), kerasps.serving.State()
    for _ in range(2):  # again, after the error
        with pytest.raises(kerasps.DeltaError) as raised:
            apply_new(reader, state)
        # The other one of two that were swapped comes first. A foreign manifest is named.
        named = {swap: name.replace("000002", "000001"), foreign: manifest_name(1, 2)}
        assert named.get(damage, name) in str(raised.value)
        check(state, 1 if damage is swap else 2)
    # A writer reads all manifests, and looks at the sizes of the files.
    if kind == "manifest" or damage not in (flip, swap):
        with pytest.warns(UserWarning, match="A new chain begins"):
            assert DeltaWriter(tmp_path, keep=2).go_on() is None


def test_the_base_of_a_chain_may_be_missing(tmp_path):
    chain(tmp_path)
    (tmp_path / manifest_name(1, 0)).unlink()
    with pytest.raises(kerasps.DeltaError, match=manifest_name(1, 0)):
        read(tmp_path)


def test_half_written_files_are_not_seen(tmp_path):
    writer = chain(tmp_path)
    (tmp_path / f"{manifest_name(1, 3)}.partial").write_text("{")
    (tmp_path / file_name(1, 3, 0)).write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("the user's")
    check(read(tmp_path), 3)
    write(writer, 4, [7, 4], removed=[3])
    check(read(tmp_path), 4)


def test_another_format_is_refused(tmp_path):
    chain(tmp_path)
    path = tmp_path / manifest_name(1, 2)
    text, _ = sealed({**json.loads(path.read_bytes()), "format": "kerasps-deltas/2"})
    path.write_bytes(text)
    with pytest.raises(kerasps.DeltaError, match=r"Received: 'kerasps-deltas/2'\. Update kerasps"):
        read(tmp_path)


def test_two_trainings_in_a_directory_are_refused(tmp_path):
    one = chain(tmp_path)
    other = DeltaWriter(tmp_path, keep=2)
    other.go_on()
    write(other, 4, [7, 4])
    with pytest.raises(kerasps.DeltaError, match="one training for a directory"):
        write(one, 5, [7, 5])
    assert read(tmp_path).version == 4


def test_the_reader_of_the_documentation_reads_what_a_training_wrote(tmp_path):
    functions = {}
    for block in code_blocks(page_text("delta_files")):
        exec(compile(block, "delta_files.md", "exec"), functions)
    layer = kerasps.layers.DynamicEmbedding(5, max_rows=1_000, seed=3, name="items")
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer, keras.layers.Flatten()])
    model.add(keras.layers.Dense(1, name="out"))
    model.compile("adagrad", "mse")
    export = kerasps.DeltaExport(tmp_path, every_steps=1)
    for first in (-4, 30):
        ids = np.arange(first, first + 40).reshape(-1, 2)
        model.fit(ids, np.ones(len(ids)), batch_size=5, verbose=0, callbacks=[export])
        layer.evict([first])
    model.fit(ids[1:], np.ones(19), verbose=0, callbacks=[export])
    tables, weights, manifest = functions["read"](tmp_path)
    rows = tables[layer.embeddings.path]
    assert sorted(rows) == [*range(-3, 30), *range(31, 70)]
    np.testing.assert_array_equal(np.stack(list(rows.values())), layer.rows(list(rows)))
    for weight in model.layers[-1].weights:
        np.testing.assert_array_equal(weights[weight.path], weight.numpy())
    entry = manifest["tables"][layer.embeddings.path]
    for stranger in (30, -4, 2**62, -(2**63)):
        np.testing.assert_array_equal(
            functions["uniform_row"](stranger, entry), layer.rows([stranger])[0]
        )
