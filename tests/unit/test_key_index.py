"""The index of a part of a table without a vocabulary, in one process."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.dynamic.ids.first_rows import FirstRows
from kerasps.dynamic.parts import key_index, key_part
from kerasps.dynamic.parts.index_growth import IndexGrowth
from kerasps.runtime.calls import separate_executor
from kerasps.runtime.on_ps import OnPS
from kerasps.variables.storage.named import NamedIndex, NamedVariable

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
KEYS = tf.TensorSpec([None], tf.int64)
PIECE = 100


class Part:
    """A part with a table, and functions on it."""

    def __init__(self):
        self.part = part = key_part.KeyPart(
            DEVICE, 2, tf.float32, 1 << 17, NamedVariable, NamedIndex, trainable=True
        )
        first = FirstRows.of(keras.initializers.get("zeros"), 2, "float32")
        terms = [key_part.TableTerms(0, first, np.int64(1), None, ())]
        self.mutex = tf.raw_ops.MutexV2(container="", shared_name=f"of {id(part)}")
        made = lambda keys: part.made(terms, key_part.AskedKeys(keys))  # noqa: E731
        self._made = OnPS(DEVICE, made, KEYS, mutex=self.mutex)
        self._find = OnPS(DEVICE, part.index.find, KEYS)
        remove = lambda keys: part.remove_keys(terms[0].holder, keys)  # noqa: E731
        self._remove = OnPS(DEVICE, remove, KEYS, mutex=self.mutex)
        self.generator = np.random.default_rng(0)

    def make(self, keys):
        return self._made.call(keys)[0]

    def find(self, keys):
        return self._find.call(keys)[0]

    def remove(self, keys):
        return int(self._remove.call(keys)[0])

    def new(self, count=PIECE):
        return self.generator.integers(-(2**63), 2**63 - 1, count)

    @property
    def state(self):
        variable = self.part.variables[0]
        return tf.raw_ops.ResourceGather(
            resource=variable.handle, indices=np.arange(6), dtype=tf.int64
        ).numpy()

    @property
    def phase(self):
        return int(self.state[0])


@pytest.fixture
def small(monkeypatch):
    """A part whose index begins with 256 buckets."""
    monkeypatch.setattr(key_index, "START_LOG", 8)
    monkeypatch.setattr(key_part, "START_LOG", 8)
    monkeypatch.setattr(key_index, "_ROOM_KEYS", PIECE)
    return Part()


def grow(part, growth):
    """Make rows, and let the index grow after each piece; return the keys of each piece."""
    pieces = []
    for _ in range(30):
        pieces.append(part.new())
        part.make(pieces[-1])
        growth.tend()
    return pieces


@pytest.fixture
def growth(small):
    growth = IndexGrowth()
    growth._thread = threading.current_thread()  # the test calls `tend`
    growth.watch(small.part, small.mutex)
    return growth


def test_an_index_grows_beside_pushes(small, growth):
    pieces = grow(small, growth)
    phase, filling, taken, buckets, *_ = small.state
    assert phase >= 6  # it grew three times, and all keys have moved
    assert phase % 2 == 0
    assert filling == 0
    assert taken <= 0.9 * buckets
    places = np.concatenate([small.find(keys) for keys in pieces])
    np.testing.assert_array_equal(places, np.arange(1, len(places) + 1))
    assert (small.find(small.new()) == 0).all()


def test_without_growth_an_index_doubles_in_pushes(small):
    pieces = [small.new() for _ in range(30)]
    for keys in pieces:
        small.make(keys)
    assert small.phase == 0
    assert small.state[3] == 4096
    places = np.concatenate([small.find(keys) for keys in pieces])
    np.testing.assert_array_equal(places, np.arange(1, len(places) + 1))


@pytest.mark.parametrize("grows", [True, False])
def test_rows_come_and_go_without_end(small, growth, grows):
    """An index keeps marks of removed keys; when it has no other bucket, a look-up fails."""
    kept, last = small.new(50), small.new()
    places = small.make(kept)
    for _ in range(60):
        small.make(last)
        if grows:
            growth.tend()
        assert small.remove(last) == PIECE
        assert (small.find(last) == 0).all()
        last = small.new()
    np.testing.assert_array_equal(small.find(kept), places)
    assert small.state[3] == 512 if grows else small.state[3] > 512


def test_a_key_that_is_removed_while_keys_move_is_gone(small, growth, monkeypatch):
    pieces = [small.new() for _ in range(2)]
    for keys in pieces:
        small.make(keys)
    # Let nothing move yet.
    growing = growth._growing[small.part]
    monkeypatch.setattr(growing, "_move_all", lambda is_over: None)
    growth.tend()
    assert small.phase == 1
    assert small.remove(pieces[0]) == PIECE
    later = small.new()
    given_back = small.make(later)
    assert set(given_back) == set(range(1, PIECE + 1))
    monkeypatch.undo()
    growth.tend()
    assert small.phase == 2
    assert (small.find(pieces[0]) == 0).all()
    np.testing.assert_array_equal(small.find(later), given_back)
    np.testing.assert_array_equal(small.find(pieces[1]), np.arange(PIECE + 1, 2 * PIECE + 1))


def test_a_key_that_is_removed_before_the_older_table_is_emptied_is_gone(
    small, growth, monkeypatch
):
    pieces = [small.new() for _ in range(2)]
    for keys in pieces:
        small.make(keys)
    give = growth._growing[small.part]._give
    # The older table keeps its keys after all have moved.
    monkeypatch.setattr(
        growth._growing[small.part],
        "_give",
        lambda log: None if log == key_index.EMPTY_LOG else give(log),
    )
    growth.tend()
    assert small.phase == 2
    np.testing.assert_array_equal(small.find(pieces[0]), np.arange(1, PIECE + 1))
    assert small.remove(pieces[0]) == PIECE
    assert (small.find(pieces[0]) == 0).all()
    np.testing.assert_array_equal(small.find(pieces[1]), np.arange(PIECE + 1, 2 * PIECE + 1))


def test_no_look_up_misses_a_key_while_the_index_grows(small, growth):
    keys = small.new()
    places = small.make(keys)
    is_over, wrong, asked = threading.Event(), [], []

    def look_up():
        with separate_executor():
            while not is_over.is_set():
                asked.append(0)
                wrong.extend(np.flatnonzero(small.find(keys) != places))

    thread = threading.Thread(target=look_up)
    thread.start()
    while len(asked) < 20 or small.phase < 6:
        small.make(small.new())
        growth.tend()
    is_over.set()
    thread.join()
    assert wrong == []


def test_a_look_up_is_traced_once_and_repeated_while_the_phase_grows(small, monkeypatch):
    keys, traced = small.new(), []
    places = small.make(keys)
    found, ran = key_index.KeyIndex.find_locked, tf.Variable(0)

    def find_locked(index, keys):
        """Misses all keys in its first two runs, in which the phase grows."""
        traced.append(keys)
        count = ran.assign_add(1)
        grows = tf.cast(count <= 2, tf.int64)
        (phase,) = index._numbers(0)
        with tf.control_dependencies([index._set({0: phase + grows})]):
            return tf.where(count <= 2, tf.zeros_like(keys), found(index, keys))

    monkeypatch.setattr(key_index.KeyIndex, "find_locked", find_locked)
    find = OnPS(DEVICE, small.part.index.find, KEYS)
    np.testing.assert_array_equal(find.call(keys)[0], places)
    assert (len(traced), int(ran)) == (1, 3)


def test_a_part_whose_ps_is_gone_is_not_watched(small, growth, monkeypatch):
    def fail(is_over):
        raise tf.errors.UnavailableError(None, None, "the ps is gone")

    monkeypatch.setattr(growth._growing[small.part], "tend", fail)
    growth.tend()
    assert len(growth._growing) == 0
