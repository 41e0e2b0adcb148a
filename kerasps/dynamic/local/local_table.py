"""The table of a layer in one process, without parameter servers."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.dynamic.ids.keys import mixed
from kerasps.dynamic.ids.rows_of_ids import RowsOfIds, check_different
from kerasps.dynamic.local.local_rows import LocalRows, LocalSlot, scatter
from kerasps.errors import InputError

_LOGGER = logging.getLogger("kerasps")
# The number of places of a table without `max_rows`: 64 MB for rows of 16 float32.
DEFAULT_PLACES = 1_000_000
# A warning is logged when this share of the places is in use.
_NEARLY_FULL = 0.9


class LocalTable(tf.Module):
    """Finds and makes the rows of ids in ordinary weights of a layer.

    The rows are in places 0, 1, … in the order in which they were made. All state is in weights,
    so whatever restores the weights of a model restores its tables: the rows by place, the id of
    each place, the number of rows, and a digest of ids and places. A hash table from id to place is
    an index of them. It is made anew when its digest is another than that of the weights.

    The optimizer is plain Keras's. Adam, for example, updates all places in each step, so a small
    `max_rows` makes steps faster.

    Thread: one at a time makes rows.

    Args:
        add_weight: the method of the layer.
        initializer: makes first rows, and knows `max_rows`.
        regularizer: the regularizer of the rows. Places without a row are zeros.

    Attributes:
        rows: the trainable weight with the rows, of shape `[places, width]`.
    """

    def __init__(
        self, add_weight: Callable[..., Any], initializer: RowsOfIds, regularizer: object
    ) -> None:
        super().__init__()
        self._initializer = initializer
        self._num_places = initializer.max_rows or DEFAULT_PLACES
        self._width = initializer.first_rows.width

        def add_state(name: str, shape: tuple[int, ...]) -> Any:
            # The aggregation makes it one variable for all replicas of a CentralStorageStrategy.
            return add_weight(
                name=name,
                shape=shape,
                dtype="int64",
                initializer="zeros",
                trainable=False,
                aggregation="only_first_replica",
            )

        self.rows = add_weight(
            name="embeddings",
            shape=(self._num_places, self._width),
            initializer="zeros",
            regularizer=regularizer,
            # Converted to another dtype, all of it would be read in each step.
            autocast=False,
        )
        self.rows.__class__, self.rows.table = LocalRows, self
        self._slots: list[weakref.ref[LocalSlot]] = []
        self._ids = add_state("ids", (self._num_places,))
        self._num_rows = add_state("num_rows", ())
        self._digest = add_state("digest", ())
        with tf.init_scope(), tf.device("CPU:0"):
            self._index = tf.lookup.experimental.MutableHashTable(
                tf.int64, tf.int64, -1, experimental_is_anonymous=True
            )
            self._indexed = _counter()
            self._num_refused = _counter()

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self._num_rows.numpy())

    @property
    def num_refused(self) -> int:
        """The number of times that a row was not made because the table was full."""
        return int(self._num_refused.numpy())

    def take(self, ids: tf.Tensor, *, training: bool = False, trainable: bool = False) -> tf.Tensor:
        """Return the rows of ids, of shape `ids.shape + [width]`.

        An id without a row has its first row.

        Args:
            ids: int64, of any shape.
            training: make the missing rows now, if `trainable`.
            trainable: gradients reach the rows, and make those that are still missing.
        """
        # Keras traces some calls for their shapes, before weights have values. Nothing is made
        # there, nor in `stateless_call`, where the values are given.
        trainable = trainable and hasattr(self.rows.value, "handle")
        flat = tf.reshape(ids, [-1])
        places = self._made(flat) if training and trainable else self._found(flat)
        if training and trainable and self._initializer.max_rows is None:
            rows = tf.gather(self.rows.value, places)
        else:
            rows = self._rows_or_first(flat, places)
        if trainable and not training:
            rows = self._making_by_gradient(flat, rows)
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [self._width]], 0))
        rows.set_shape(ids.shape.concatenate([self._width]))
        return rows

    def keep(self, slot: LocalSlot) -> None:
        """Let the rows of a slot move with those of the table."""
        self._slots.append(weakref.ref(slot))

    def sorted_ids(self) -> np.ndarray:
        """Return the ids of the table, ascending."""
        return np.sort(np.asarray(self._ids.value[: self.num_rows]))

    def places_of(self, ids: np.ndarray, *, makes: bool = False) -> np.ndarray:
        """Return the places of ids, -1 for an id without a row.

        Args:
            makes: make these rows.

        Raises:
            InputError: there are not enough places; nothing is changed.
        """
        keys = tf.constant(ids, tf.int64)
        places = np.asarray(self._found(keys))
        if makes:
            self._check_room(self.num_rows + int(np.sum(places < 0)))
            places = np.asarray(self._made(keys))
        return places

    def find_rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of a vector of int64 ids; makes none."""
        return np.asarray(self.take(tf.constant(ids, tf.int64)))

    def row_items(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over ids and their rows, in the order of their places, `batch` at a time."""
        for start in range(0, self.num_rows, batch):
            places = tf.range(start, min(start + batch, self.num_rows))
            ids, rows = (tf.gather(state.value, places) for state in (self._ids, self.rows))
            yield np.asarray(ids), np.asarray(rows)

    def write_rows(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Set the rows of different ids; makes those that are missing.

        Raises:
            InputError: there are not enough places; nothing is changed.
        """
        self.rows.write_rows(ids, rows)

    def replace_rows(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Replace all rows of the table. Rows of ids that it had keep their slots.

        Args:
            ids: a vector of different ids.
            rows: their rows.

        Raises:
            InputError: there are not enough places, or an id is there twice; nothing is changed.
        """
        check_different(ids)
        self._check_room(len(ids))
        slots = [(slot, slot.find_rows(ids)) for ref in self._slots if (slot := ref()) is not None]
        numbers = tf.range(len(ids), dtype=tf.int64)
        keys = tf.constant(ids, tf.int64)
        for state in (self.rows, self._ids):
            state.assign(tf.zeros(state.shape, state.dtype))
        scatter(self.rows, numbers, rows)
        scatter(self._ids, numbers, keys)
        self._num_rows.assign(len(ids))
        self._digest.assign(_digest(keys, numbers))
        for slot, values in slots:
            slot.begin_with(numbers, values)

    def _check_room(self, num_rows: int) -> None:
        if num_rows > self._num_places:
            raise InputError(
                "A table of a DynamicEmbedding has no room for all rows. Expected: at most "
                f"{self._num_places:,} rows. Received: {num_rows:,}. Make the layer with "
                f"max_rows={num_rows} or more."
            )

    def _found(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the places of a vector of ids, -1 for an id without a row."""
        with tf.device("CPU:0"):
            self._renew_index()
            return self._places(ids)

    def _made(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the places of a vector of ids, after the missing rows were made."""
        with tf.device("CPU:0"):
            self._renew_index()
            found = self._places(ids)
            return tf.cond(tf.reduce_any(found < 0), lambda: self._make(ids, found), lambda: found)

    def _making_by_gradient(self, ids: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        """Return rows whose gradient makes those that are missing.

        Keras does not tell a layer that it trains if the call of the model has no argument
        `training`.
        """

        def backward(gradient: tf.Tensor) -> list[tf.IndexedSlices]:
            places = self._made(ids)
            has_row = tf.reshape(tf.where(places >= 0), [-1])
            return [
                tf.IndexedSlices(
                    tf.gather(gradient, has_row),
                    tf.gather(places, has_row),
                    tf.constant([self._num_places, self._width], tf.int64),
                )
            ]

        rows = tf.identity(rows)
        _compat.record_operation("TakeRows", [rows], [self.rows.handle], backward)
        return rows

    def _renew_index(self) -> None:
        """Make the index anew if the weights were assigned from elsewhere."""
        digest = tf.convert_to_tensor(self._digest.value)

        def renew() -> tf.Tensor:
            ids = self._ids.value[: self._num_rows.value]
            tf.raw_ops.LookupTableImportV2(
                table_handle=self._index.resource_handle,
                keys=ids,
                values=tf.range(tf.size(ids, tf.int64)),
            )
            _assign(self._indexed, digest)
            return tf.constant(True)

        tf.cond(tf.equal(digest, self._indexed), lambda: tf.constant(False), renew)

    def _make(self, ids: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
        """Make the rows of the ids whose places are -1, and return the places of all."""
        new = tf.unique(tf.boolean_mask(ids, places < 0)).y
        before = tf.convert_to_tensor(self._num_rows.value)
        room = self._num_places - before
        if self._initializer.max_rows is None:
            with tf.control_dependencies([self._fits(new, room)]):
                made = tf.identity(new)
        else:
            made = new[:room]
        after = before + tf.size(made, tf.int64)
        self._note_room(before, after, tf.size(new, tf.int64) - tf.size(made, tf.int64))
        numbers = tf.range(before, after)
        scatter(self.rows, numbers, self._initializer.rows(made))
        scatter(self._ids, numbers, made)
        self._index.insert(made, numbers)
        digest = self._digest.value + _digest(made, numbers)
        _assign(self._num_rows, after)
        _assign(self._digest, digest)
        _assign(self._indexed, digest)
        return self._places(ids)

    def _places(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the places of a vector of ids, -1 for an id without a row."""
        places = self._index.lookup(ids)
        places.set_shape(ids.shape)
        return places

    def _fits(self, new: tf.Tensor, room: tf.Tensor) -> tf.Operation | None:
        return tf.debugging.Assert(
            tf.size(new, tf.int64) <= room,
            [
                "A table of a DynamicEmbedding without a strategy is full. Expected: at most "
                f"{self._num_places:,} rows, as `max_rows` was not given. Received: a batch with "
                "more new ids than there is room for. Make the layer with a larger `max_rows`. "
                "The number of new ids and the room:",
                tf.size(new, tf.int64),
                room,
            ],
        )

    def _note_room(self, before: tf.Tensor, after: tf.Tensor, refused: tf.Tensor) -> None:
        """Count rows that are not made; warn once of the first, and when little room is left."""
        much = math.ceil(_NEARLY_FULL * self._num_places)
        first = (refused > 0) & tf.equal(self._num_refused, 0)
        much_now = (before < much) & (after >= much)
        tf.raw_ops.AssignAddVariableOp(resource=self._num_refused.handle, value=refused)

        def warn() -> tf.Tensor:
            tf.numpy_function(self._warn, [after, first], [])
            return tf.constant(True)

        tf.cond(first | much_now, warn, lambda: tf.constant(False))

    def _warn(self, num_rows: np.int64, refuses: np.bool_) -> None:
        name = self.rows.path
        if refuses:
            _LOGGER.warning(
                "The table %r is full: it has %s rows, which is max_rows. Ids without a row have "
                "their first values from now on, and do not learn. Make the layer with a larger "
                "max_rows.",
                name,
                f"{num_rows:,}",
            )
        else:
            _LOGGER.warning(
                "The table %r is nearly full: it has %s rows, and room for %s. Make the layer with "
                "a larger max_rows.",
                name,
                f"{num_rows:,}",
                f"{self._num_places:,}",
            )

    def _rows_or_first(self, ids: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
        """Return the rows at places, and the first rows of ids whose place is -1."""
        # The missing read no place at all, so no row of another id gets a gradient of zeros, by
        # which an optimizer with momentum would update it.
        found, missing = (
            tf.reshape(tf.where(chosen), [-1]) for chosen in (places >= 0, places < 0)
        )
        rows = tf.gather(self.rows.value, tf.gather(places, found))
        with tf.device("CPU:0"):
            first = self._initializer.rows(tf.gather(ids, missing))
        numbers = [tf.cast(found, tf.int32), tf.cast(missing, tf.int32)]
        return tf.dynamic_stitch(numbers, [rows, first])


def _counter() -> tf.Variable:
    return tf.Variable(
        0,
        dtype=tf.int64,
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def _digest(ids: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Return the sum, over rows, of a number that follows from id and place."""
    return tf.reduce_sum(mixed(mixed(ids) + places))


# These write by the handle, as a replica of a CentralStorageStrategy cannot assign in a `tf.cond`,
# and on the device of the variable, which may be a GPU.
def _assign(variable: tf.Variable, value: tf.Tensor) -> None:
    with tf.device(None):
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
