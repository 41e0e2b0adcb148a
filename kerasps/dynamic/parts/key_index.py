"""The index of a part: it finds the places of keys, and grows without a long stop.

A hash table of TensorFlow that is full doubles, and all who use it wait: 0.4 s at 5 million keys.
So an index has two tables. When the one in use is nearly full, somebody beside the steps (see
`index_growth.py`) gives the other one larger memory. New keys then go there, and the old ones
follow, some at a time. If nobody does, the table doubles within a push, as TensorFlow's tables do.

The phase says which tables have keys, and only increases:

| phase mod 4 | all keys are in | new keys go to |
| --- | --- | --- |
| 0 | the first table | the first |
| 1 | the first and the second | the second |
| 2 | the second | the second |
| 3 | the second and the first | the first |

Look-ups ask both tables, and take no lock. A table is emptied only in an even phase, when all keys
are in the other one. So a look-up may have missed a key only if the phase grew while it ran: then
it looks again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.variables.rows.row_store import RowStore
from kerasps.variables.storage.named import MOST_LOAD, UNUSED_KEYS, NamedIndex, NamedVariable

# The binary logarithm of the number of buckets of a new index, and of a table without keys.
START_LOG, EMPTY_LOG = 20, 2
# A table is nearly full when it has room for this share of its buckets, or for so many keys:
# they come while the other one is made.
_ROOM, _ROOM_KEYS = 0.15, 1 << 19
# The greatest load of a table when all keys have moved to it. Between this and the smallest, half
# of it, a key takes 22 to 44 bytes.
_LOAD_AFTER = 0.55
# In the state: the phase; the logarithm of the buckets that the other table is being given, or 0;
# the keys that the newer table took, and its buckets; the places whose keys are to move.
_PHASE, _FILLING, _TAKEN, _BUCKETS, _NEXT, _END = range(6)


def first_state() -> tf.Tensor:
    """Return the state of an index without keys."""
    return tf.constant([0, 0, 0, 1 << START_LOG, 0, 0], tf.int64)


class KeyIndex:
    """The index of a part, on its ps. Methods add operations to a graph there.

    Args:
        tables: the two hash tables.
        state: six numbers (see `first_state`).
    """

    def __init__(self, device: str, tables: tuple[NamedIndex, NamedIndex], state: NamedVariable):
        self.device = device
        self._tables, self._state = tables, RowStore(state, 0, device)

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        """Return the place of each key, 0 for one that has none. Needs no lock."""

        def attempt(*_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            (phase,) = self._numbers(_PHASE)
            with tf.control_dependencies([phase]):
                places = self.find_locked(keys)
            with tf.control_dependencies([places]):
                (after,) = self._numbers(_PHASE)
            places.set_shape(keys.shape)
            return places, tf.equal(phase, after)

        # A loop for the first attempt too, as each use of `attempt` costs a trace.
        none = tf.zeros_like(keys), tf.constant(False)
        return tf.while_loop(lambda _, is_sure: ~is_sure, attempt, none)[0]

    def find_locked(self, keys: tf.Tensor) -> tf.Tensor:
        """Return the place of each key, 0 for one that has none. Call under the lock."""
        # A key that both tables have has the same place in both. To ask an empty one costs less
        # than to choose.
        first, second = (_find(table, keys) for table in self._tables)
        return tf.cast(tf.maximum(first, second), tf.int64)

    def insert(self, keys: tf.Tensor, places: tf.Tensor) -> tf.Operation:
        """Add different keys that the index does not have. Call under the lock."""
        phase, taken, buckets = self._numbers(_PHASE, _TAKEN, _BUCKETS)
        count, values = tf.size(keys, tf.int64), tf.cast(places, tf.int32)
        most = tf.cast(MOST_LOAD * tf.cast(buckets, tf.float64), tf.int64)
        is_full = (taken + count > most) & (count > 0)

        def put(table: NamedIndex) -> tf.Tensor:
            with tf.control_dependencies([_insert(table, keys, values)]):
                return tf.stack([taken + count, buckets])

        def double(table: NamedIndex) -> tf.Tensor:
            held = tf.raw_ops.LookupTableSizeV2(table_handle=table.handle)
            # A table doubles if an insertion has more keys than there is room for. It counts no
            # removed keys, whose buckets are free only then. So the first key comes many times.
            fill = tf.maximum(most + 1 - held, 0)
            with tf.control_dependencies([held]):
                inserted = _insert(
                    table,
                    tf.concat([tf.repeat(keys[:1], fill), keys], 0),
                    tf.concat([tf.repeat(values[:1], fill), values], 0),
                )
            with tf.control_dependencies([inserted]):
                return tf.stack([held + count, 2 * buckets])

        now = self._in_newer(phase, put, double, which=tf.cast(is_full, tf.int32))
        return self._set({_TAKEN: now[0], _BUCKETS: now[1]})

    def remove(self, keys: tf.Tensor) -> tf.Operation:
        """Remove keys. Call under the lock."""
        # Of both tables: the older one keeps its keys until it is emptied, and look-ups ask it.
        removed = [
            tf.raw_ops.LookupTableRemoveV2(table_handle=table.handle, keys=keys)
            for table in self._tables
        ]
        return tf.group(removed)

    # Growth: `prepare`, `fill`, `begin`; `move` until nothing is left; `fill`, `begin`.

    def prepare(self, num_keys: tf.Tensor) -> list[tf.Tensor]:
        """Claim the table that is not in use if the other one is nearly full. Under the lock.

        Args:
            num_keys: the number of keys.

        Returns:
            The logarithm of the buckets that the caller shall give it with `fill`, 0 if none; the
            phase; the number of keys that may come until the index is nearly full.
        """
        phase, filling, taken, buckets = self._numbers(_PHASE, _FILLING, _TAKEN, _BUCKETS)
        size = tf.cast(buckets, tf.float64)
        most = MOST_LOAD * size - tf.maximum(_ROOM * size, np.float64(_ROOM_KEYS))
        room = tf.cast(most, tf.int64) - taken
        logs = np.arange(START_LOG, 40)
        enough = tf.cast(num_keys, tf.float64) <= _LOAD_AFTER * 2.0**logs
        log = START_LOG + tf.argmax(enough)
        is_due = _is_even(phase) & tf.equal(filling, 0) & (room < 0)
        log = tf.where(is_due, log, tf.zeros_like(log))
        with tf.control_dependencies([self._set({_FILLING: filling + log})]):
            return [tf.identity(log), phase, room]

    def fill(self, log: tf.Tensor) -> tf.Tensor:
        """Empty the table that is not in use, and give it other memory. Without the lock.

        Call once after `prepare` or the last `move`. It may take a second; steps go on meanwhile.
        """
        phase, filling = self._numbers(_PHASE, _FILLING)
        shape = tf.stack([tf.bitwise.left_shift(np.int64(1), log), 1])
        keys = tf.fill(shape, UNUSED_KEYS[0])
        values = tf.raw_ops.Empty(shape=tf.cast(shape, tf.int32), dtype=tf.int32, init=False)
        # TensorFlow's shape function expects vectors, and its kernel the matrix that it exports.
        keys, values = (
            tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tf.TensorShape(None))
            for tensor in (keys, values)
        )

        def give(table: NamedIndex) -> tf.Tensor:
            given = tf.raw_ops.LookupTableImportV2(
                table_handle=table.handle, keys=keys, values=values
            )
            with tf.control_dependencies([given]):
                return tf.constant(0)

        first, second = self._tables
        which = tf.where(tf.equal(filling, log) & _is_even(phase), _mod4(phase), 1)
        nothing = functools.partial(tf.constant, 0)
        branches = [lambda: give(second), nothing, lambda: give(first), nothing]
        return tf.switch_case(tf.cast(which, tf.int32), branches)

    def begin(self, log: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
        """Let new keys go to the table that was filled. Call under the lock.

        Args:
            log: the argument of `fill`.
            end: the place behind that of the last key.
        """
        phase, filling, taken, buckets, first, last = self._numbers(*range(6))
        is_filled = tf.equal(filling, log)
        begins = is_filled & (log > EMPTY_LOG)
        changes = {
            _PHASE: tf.where(begins, phase + 1, phase),
            _FILLING: tf.where(is_filled, tf.zeros_like(filling), filling),
            _TAKEN: tf.where(begins, tf.zeros_like(taken), taken),
            _BUCKETS: tf.where(begins, tf.bitwise.left_shift(np.int64(1), log), buckets),
            _NEXT: tf.where(begins, tf.ones_like(first), first),
            _END: tf.where(begins, end, last),
        }
        with tf.control_dependencies([self._set(changes)]):
            return tf.constant(0)

    def move(
        self,
        count: tf.Tensor,
        keys_between: Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
    ) -> tf.Tensor:
        """Move the keys of some places to the newer table. Call under the lock.

        Args:
            count: the most places.
            keys_between: returns the places of a range that have keys, and these.

        Returns:
            How many places are left; 0 once there are none, -1 if there were none. At 0 the caller
            shall `fill` the older table with `EMPTY_LOG`, and call `begin`.
        """
        phase, first, end = self._numbers(_PHASE, _NEXT, _END)
        last = tf.minimum(first + count, end)

        def some() -> tf.Tensor:
            places, keys = keys_between(first, last)
            # A table that has a key behind a removed one would take it twice.
            found = self._in_newer(phase, functools.partial(_find, keys=keys))
            missing = tf.where(tf.equal(found, 0))[:, 0]
            insert = self.insert(tf.gather(keys, missing), tf.gather(places, missing))
            with tf.control_dependencies([insert]):
                is_last = tf.cast(tf.equal(last, end), tf.int64)
                change = {_PHASE: phase + is_last, _FILLING: EMPTY_LOG * is_last, _NEXT: last}
                with tf.control_dependencies([self._set(change)]):
                    return end - last

        return tf.cond(_is_even(phase), lambda: tf.constant(-1, tf.int64), some)

    def _numbers(self, *at: int) -> list[tf.Tensor]:
        return list(tf.unstack(self._state.gather(tf.constant(at, tf.int32)), len(at)))

    def _set(self, numbers: dict[int, tf.Tensor]) -> tf.Operation:
        return tf.raw_ops.ResourceScatterUpdate(
            resource=self._state.holder.handle,
            indices=tf.constant([*numbers], tf.int32),
            updates=tf.stack([*numbers.values()]),
        )

    def _in_newer(
        self, phase: tf.Tensor, *works: Callable[[NamedIndex], Any], which: Any = 0
    ) -> Any:
        """Do one of some things with the table that new keys go to."""
        is_second = tf.bitwise.bitwise_and(tf.bitwise.right_shift(phase + 1, np.int64(1)), 1)
        branches = [functools.partial(work, table) for work in works for table in self._tables]
        return tf.switch_case(2 * which + tf.cast(is_second, tf.int32), branches)


def _insert(table: NamedIndex, keys: tf.Tensor, values: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.LookupTableInsertV2(table_handle=table.handle, keys=keys, values=values)


def _find(table: NamedIndex, keys: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.LookupTableFindV2(
        table_handle=table.handle, keys=keys, default_value=np.int32(0)
    )


def _mod4(phase: tf.Tensor) -> tf.Tensor:
    return tf.bitwise.bitwise_and(phase, np.int64(3))


def _is_even(phase: tf.Tensor) -> tf.Tensor:
    return tf.equal(tf.bitwise.bitwise_and(phase, np.int64(1)), 0)
