"""The table of a layer in one process, without parameter servers."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.dynamic.ids.admission import Admission
from kerasps.dynamic.ids.rows_of_ids import RowsOfIds
from kerasps.dynamic.local.local_candidates import LocalCandidates, admitted
from kerasps.dynamic.local.local_changes import LocalChanges
from kerasps.dynamic.local.local_places import LocalPlaces, digest_of
from kerasps.dynamic.local.local_rows import LocalSlot, numbers, scatter
from kerasps.dynamic.local.local_usage import LocalUsage
from kerasps.dynamic.tables.changed import ChangedRows

_LOGGER = logging.getLogger("kerasps")
# A warning is logged when this share of the places is in use.
_NEARLY_FULL = 0.9


class LocalTable(LocalPlaces):
    """Finds and makes the rows of ids in one process (see `LocalPlaces`).

    Rows stay where they were made. The optimizer is plain Keras's. Adam, for example, updates all
    places in each step, so a small `max_rows` makes steps faster.

    Thread: one at a time makes rows.

    Args:
        add_weight: the method of the layer.
        initializer: how the table begins.
        regularizer: the regularizer of the rows. Places without a row are zeros.

    Attributes:
        candidates: the ids that are counted and have no row; None if none are counted.
        usage: notes the use of rows; None without eviction.
    """

    def __init__(
        self, add_weight: Callable[..., keras.Variable], initializer: RowsOfIds, regularizer: object
    ) -> None:
        super().__init__(add_weight, initializer, regularizer)
        most = None if initializer.admission is None else initializer.admission.max_candidates
        self.candidates = None if most is None else LocalCandidates(add_weight, most)
        self._slots: list[weakref.ref[LocalSlot]] = []
        eviction = initializer.eviction
        self.usage = None if eviction is None else LocalUsage(add_weight, self.rows, eviction)
        self._changes: LocalChanges | None = None
        with tf.init_scope(), tf.device("CPU:0"):
            self._num_refused, self._num_dropped = numbers(), numbers()

    @property
    def figures(self) -> dict[str, int | float]:
        """The numbers of the table (see `DynamicEmbedding.figures`)."""
        candidates = self.candidates
        of_evictions = {} if self.usage is None else self.usage.figures
        return {
            "rows": self.num_rows,
            "bytes": self.num_rows * self._width * tf.as_dtype(self.rows.dtype).size,
            "inserted": self.num_rows + of_evictions.get("evicted", 0),
            "candidates": 0 if candidates is None else candidates.num_rows,
            "refused_for_room": self.num_refused,
            "refused_by_admission": int(self._num_dropped.numpy()),
            **dict.fromkeys(("evicted", "mean_age_of_evicted", "resurrected", "pushed_ids"), 0),
            **of_evictions,
        }

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
        begins, makes = self._initializer, training and trainable
        before = self._found(flat) if begins.reads_zeros or not makes else None
        places = self._made(flat) if makes else before
        if makes and begins.most_rows_on_ps(1, 0) is None and begins.admission is None:
            rows = tf.gather(self.rows.value, places)
        else:
            rows = self._rows_or_default(flat, places)
        if makes and before is not None:
            # On ps, too, a row is read from the next step on. A gradient reaches it now.
            rows -= tf.stop_gradient(tf.where(before[:, None] < 0, rows, 0))
        if trainable and not training:
            rows = self._making_by_gradient(flat, rows)
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [self._width]], 0))
        rows.set_shape(ids.shape.concatenate([self._width]))
        return rows

    def keep(self, slot: LocalSlot) -> None:
        """Let the rows of a slot move with those of the table."""
        self._slots.append(weakref.ref(slot))

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
            places = np.asarray(self._made(keys, admits_all=True))
        return places

    def find_rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of a vector of int64 ids; makes none."""
        return np.asarray(self.take(tf.constant(ids, tf.int64)))

    def changed_since(self, version: object, batch: int) -> ChangedRows:
        """Return the rows that changed since a version. The first question makes a copy of all."""
        found = [*self.row_items(self.num_places)]
        ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in found)])
        dtype = tf.as_dtype(self.rows.dtype).as_numpy_dtype
        rows = np.concatenate([np.zeros([0, self._width], dtype), *(rows for _, rows in found)])
        if self._changes is None:
            self._changes = LocalChanges(self._width, rows.dtype)
        order = np.argsort(ids)
        return self._changes.since(version, ids[order], rows[order], batch)

    def write_rows(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Set the rows of different ids; makes those that are missing.

        Raises:
            InputError: there are not enough places; nothing is changed.
        """
        self.rows.write_rows(ids, rows)

    def replace_rows(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Do the same as `LocalPlaces.replace_rows`. Rows of ids that it had keep their slots."""
        self.check(ids)
        slots = [(slot, slot.find_rows(ids)) for ref in self._slots if (slot := ref()) is not None]
        super().replace_rows(ids, rows)
        for slot, values in slots:
            slot.begin_with(np.arange(len(ids)), values)

    def remove_rows(self, ids: np.ndarray) -> int:
        """Remove the rows of different ids, and the counts of candidates; return how many rows."""
        before = self.num_rows
        if self.usage is not None:
            places = self.places_of(ids)
            self.usage.tell_gone(tf.constant(ids[places >= 0]), tf.constant(places[places >= 0]))
        for of_ids in (self, self.candidates):
            if of_ids is not None:
                kept = np.setdiff1d(of_ids.sorted_ids(), ids, assume_unique=True)
                of_ids.replace_rows(kept, of_ids.find_rows(kept))
        return before - self.num_rows

    def _found(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the places of a vector of ids, -1 for an id without a row."""
        with tf.device("CPU:0"):
            self.renew_index()
            return self.places(ids)

    def _made(self, ids: tf.Tensor, *, admits_all: bool = False) -> tf.Tensor:
        """Return the places of a vector of ids, after the missing rows were made."""
        admission = None if admits_all else self._initializer.admission
        with tf.device("CPU:0"):
            self.renew_index()
            found = self.places(ids)
            met = [] if admission is None and self.usage is None else self._met_before(ids)
            if self.usage is not None and not admits_all:
                self._use(self.usage, ids, found, is_first=not met)
            return tf.cond(
                tf.reduce_any(found < 0),
                lambda: self._make(ids, found, admission, met),
                lambda: found,
            )

    def _met_before(self, ids: tf.Tensor) -> list[tf.Tensor]:
        """Return the ids of earlier calls in the graph of a step, and note these.

        A step counts an id once, however many calls of the layer it has. Eager calls are steps.
        """
        if tf.executing_eagerly():
            return []
        calls = tf.compat.v1.get_default_graph().get_collection_ref(f"ids met by {id(self)}")
        before = list(calls)
        calls.append(ids)
        return before

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
                    tf.constant([self.num_places, self._width], tf.int64),
                )
            ]

        rows = tf.identity(rows)
        _compat.record_operation("TakeRows", [rows], [self.rows.handle], backward)
        return rows

    def _make(
        self,
        ids: tf.Tensor,
        places: tf.Tensor,
        admission: Admission | None,
        met: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Make the rows of the ids whose places are -1, and return the places of all.

        Args:
            met: ids that the step has met before, which get no rows.
        """
        missing = tf.unique(tf.boolean_mask(ids, places < 0)).y
        if met and admission is not None:
            missing = tf.raw_ops.ListDiff(x=missing, y=tf.concat(met, 0)).out
        new = admitted(admission, self.candidates, self._initializer.salt, missing)
        dropped = tf.size(missing, tf.int64) - tf.size(new, tf.int64)
        tf.raw_ops.AssignAddVariableOp(resource=self._num_dropped.handle, value=dropped)
        before = self.num_rows_now
        room = self.num_places - before
        if self._initializer.most_rows_on_ps(1, 0) is None:
            with tf.control_dependencies([self._fits(new, room)]):
                made = tf.identity(new)
        else:
            made = new[:room]
        others = new[tf.size(made) :]
        if (usage := self.usage) is not None:
            replaced = tf.cond(
                tf.size(others) > 0,
                lambda: self._replace_first(usage, others, before),
                lambda: 0,
            )
            others = others[replaced:]
        self._note_room(before, before + tf.size(made, tf.int64), tf.size(others, tf.int64))
        self.append(made)
        if self.usage is not None:
            self.usage.begin(tf.range(before, before + tf.size(made, tf.int64)))
        return self.places(ids)

    def _use(self, usage: LocalUsage, ids: tf.Tensor, places: tf.Tensor, *, is_first: bool) -> None:
        """Note that a call uses rows; let those begin anew whose time is over.

        Args:
            is_first: whether the call is the first one of its step.
        """
        if is_first:
            usage.begin_step()
        usage.asked(tf.size(tf.unique(ids).y, tf.int64))
        used = tf.unique(tf.boolean_mask(places, places >= 0)).y
        if usage.rows_expire:
            expired = tf.boolean_mask(used, usage.expired(used))
            self._replace(usage, expired, self.ids_at(expired))
        usage.note(used)

    def _replace_first(self, usage: LocalUsage, ids: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        """Make rows of ids in place of those that go first; return of how many."""
        places = usage.first_in_order(tf.size(ids, tf.int64), num_rows)
        self._replace(usage, places, ids[: tf.size(places)])
        return tf.size(places)

    def _replace(self, usage: LocalUsage, places: tf.Tensor, ids: tf.Tensor) -> None:
        """Give different places, and their slots, to the first rows of ids."""
        gone = self.ids_at(places)
        usage.tell_gone(gone, places)
        self.index.remove(gone)
        self.index.insert(ids, places)
        self.write(places, self._initializer.rows(ids), ids)
        for slot in [slot for ref in self._slots if (slot := ref()) is not None]:
            begun = slot.initializer([1, *slot.shape[1:]], dtype=slot.dtype)
            scatter(slot, places, tf.repeat(begun, tf.size(places), 0))
        usage.begin(places)
        self.set_size(self.num_rows_now, digest_of(ids, places) - digest_of(gone, places))

    def _fits(self, new: tf.Tensor, room: tf.Tensor) -> tf.Operation | None:
        return tf.debugging.Assert(
            tf.size(new, tf.int64) <= room,
            [
                "A table of a DynamicEmbedding without a strategy is full. Expected: at most "
                f"{self.num_places:,} rows, as `max_rows` was not given. Received: a batch with "
                "more new ids than there is room for. Make the layer with a larger `max_rows`. "
                "The number of new ids and the room:",
                tf.size(new, tf.int64),
                room,
            ],
        )

    def _note_room(self, before: tf.Tensor, after: tf.Tensor, refused: tf.Tensor) -> None:
        """Count rows that are not made; warn once of the first, and when little room is left."""
        much = math.ceil(_NEARLY_FULL * self.num_places)
        first = (refused > 0) & tf.equal(self._num_refused, 0)
        much_now = (before < much) & (after >= much) & (self.usage is None)
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
                f"{self.num_places:,}",
            )

    def _rows_or_default(self, ids: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
        """Return the rows at places, and what ids whose place is -1 read."""
        # The missing read no place at all, so no row of another id gets a gradient of zeros, by
        # which an optimizer with momentum would update it.
        found, missing = (
            tf.reshape(tf.where(chosen), [-1]) for chosen in (places >= 0, places < 0)
        )
        rows = tf.gather(self.rows.value, tf.gather(places, found))
        with tf.device("CPU:0"):
            first = self._initializer.default_rows(tf.gather(ids, missing))
        numbers = [tf.cast(found, tf.int32), tf.cast(missing, tf.int32)]
        return tf.dynamic_stitch(numbers, [rows, first])
