"""The Keras variable of a table without a vocabulary, or of a slot of one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike, DTypeLike

from kerasps import _compat
from kerasps.dynamic.ids.keys import part_of
from kerasps.dynamic.ids.rows_of_ids import CountsOfIds, RowsOfIds, UsageOfRows
from kerasps.dynamic.parts.keyed_rows import KeyedRows, KeyedStorage, no_gradient
from kerasps.dynamic.policies.terms import AskedKeys, Field
from kerasps.dynamic.tables.row_access import RowAccess, access_to
from kerasps.dynamic.tables.row_files import (
    RowsById,
    TableValue,
    VariableById,
    not_later,
    value_of,
    values_for_checkpoint,
)
from kerasps.errors import UnsupportedError
from kerasps.variables.keras.variable import ParameterServerVariable
from kerasps.variables.lanes.phase import (
    current_phase,
    note_assignment,
    strategy_of_new_variables,
    wait_for_steps,
)
from kerasps.variables.storage.named import on_own_task
from kerasps.variables.storage.tensor_like import note_read

# The rows of a piece.
_BATCH = 1 << 16


class KeyedVariable(ParameterServerVariable, VariableById):
    """The rows of the ids that came, on all ps; its value as a whole is refused.

    Attributes:
        rows_of_ids: how the table begins; None for a slot.
    """

    has_whole_value = False
    rows_of_ids: RowsOfIds | None = None
    _value: KeyedStorage

    def begin(self, rows_of_ids: RowsOfIds, storage: KeyedStorage) -> None:
        """Take the storage of a table that has no rows yet."""
        rule = strategy_of_new_variables().extended.wire_rule
        self.rows_of_ids, self._value = rows_of_ids, storage
        dtype = storage.dtype
        self.wire_dtype = rule.dtype_of(self.path, dtype) if self.trainable else dtype

    def begin_slot(self, table: KeyedStorage, initializer: Any) -> None:
        """Make the storage of a slot of a table."""
        self.wire_dtype = dtype = tf.as_dtype(self._dtype)
        if isinstance(initializer, UsageOfRows):
            self._value = table.add_slot(self.path, dtype, 0.0, initializer.num_columns)
            table.table.usage = self._value.terms
            return
        self._value = table.add_slot(self.path, dtype, _constant_of(initializer, self.path))

    @property
    def sharding(self) -> Any:
        return self._value.sharding

    @property
    def num_rows(self) -> int:
        """The number of rows that there are, over all ps."""
        return self.access.table.num_rows()

    @property
    def figures(self) -> dict[str, int | float]:
        """The numbers of `DynamicEmbedding.figures`, without that of candidates."""
        fields = [int(number) for number in self.access.table.figures()]
        return {
            "rows": fields[Field.ROWS],
            "bytes": fields[Field.ROWS] * self.row_bytes,
            "inserted": fields[Field.MADE],
            "refused_for_room": fields[Field.REFUSED],
            "refused_by_admission": fields[Field.DROPPED],
            "evicted": fields[Field.EVICTED],
            "mean_age_of_evicted": fields[Field.AGES] / max(fields[Field.EVICTED], 1),
            "resurrected": fields[Field.REMADE],
            "pushed_ids": fields[Field.ASKED],
        }

    def bytes_by_ps(self) -> list[int]:
        """Return the bytes of its rows and their slots on each ps, when they were last counted."""
        known = self._value.table.known_fields
        return [
            known[part.device][Field.ROWS] * self.row_bytes if part.device in known else 0
            for part in self._value.shards
        ]

    @property
    def row_bytes(self) -> int:
        """The bytes of a row and its slots."""
        width = int(self._value.shape[1])
        of_slots = (
            int(slot.dtype.size) * (slot.width or width) for slot in self._value.table.terms.slots
        )
        return width * int(self._value.dtype.size) + sum(of_slots)

    def take(self, ids: tf.Tensor, *, from_end: bool = False) -> tf.Tensor:
        """Return the rows of ids; a step makes those that it updates.

        Args:
            ids: integers of any shape.
            from_end: has no meaning here; negative ids are ids.

        Returns:
            A tensor of shape `ids.shape + [width]`. An id without a row gets its first row.
        """
        del from_end
        ids = tf.cast(tf.convert_to_tensor(ids), tf.int64)
        if _compat.in_symbolic_scope():
            rows = tf.zeros(tf.concat([tf.shape(ids), self._value.shape[1:]], 0), self._value.dtype)
            rows.set_shape(ids.shape.concatenate(self._value.shape[1:]))
            return self._maybe_autocast(rows)
        current = self.resolves_through()
        if current is None:
            wait_for_steps()
            return self._maybe_autocast(_without_gradient(self._look_up(ids), self.path))
        note_read(self)
        return self._maybe_autocast(current.read_rows(self, ids, from_end=False))

    def _look_up(self, ids: tf.Tensor) -> tf.Tensor:
        """Look rows up outside of a step."""
        flat = tf.reshape(ids, [-1])
        keys, positions = tf.unique(self._value.table.keys(flat))
        num_parts = len(self._value.shards)
        part = part_of(keys, num_parts)
        order = tf.dynamic_partition(tf.range(tf.size(keys)), part, num_parts)
        of_parts = tf.dynamic_partition(keys, part, num_parts)
        rows = [
            on_own_task(functools.partial(find, keys), is_repeatable=True)
            for find, keys in zip(self._finders, of_parts, strict=True)
        ]
        found = tf.gather(tf.dynamic_stitch(order, rows), positions)
        found = tf.reshape(found, tf.concat([tf.shape(ids), self._value.shape[1:]], 0))
        found.set_shape(ids.shape.concatenate(self._value.shape[1:]))
        return found

    @functools.cached_property
    def _finders(self) -> list[Any]:
        """For each part, a function from keys to rows."""

        def finder(rows: KeyedRows) -> Any:
            def find(keys: tf.Tensor) -> tf.Tensor:
                with tf.device(rows.device):
                    keys = tf.identity(keys)
                    return rows.look_up([rows], AskedKeys(keys))[0]

            spec = tf.TensorSpec([None], tf.int64)
            return tf.function(find, autograph=False).get_concrete_function(spec)

        with tf.init_scope():
            return [finder(rows) for rows in self._value.shards]

    # Rows by their ids, outside of steps.

    @property
    def access(self) -> RowAccess:
        """Reads and writes rows of this variable when no step is in flight."""
        self._make_current()
        return access_to(self._value)

    @property
    def table_of_rows(self) -> object:
        return self._value.table

    def sorted_ids(self) -> np.ndarray:
        return self.access.sorted_ids()

    def find_rows(self, ids: np.ndarray) -> np.ndarray:
        return self.access.read(ids)

    def row_items(self, batch: int = _BATCH) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over pieces of the rows that there are, and their ids, in no order."""
        return self.access.items(batch)

    def write_rows(self, ids: np.ndarray, rows: ArrayLike) -> None:
        note_assignment()
        self.access.write_within_limit(ids, rows)

    def replace_rows(self, ids: np.ndarray, rows: ArrayLike) -> None:
        note_assignment()
        self.access.replace(np.asarray(ids, np.int64), rows)

    def numpy(self) -> RowsById:
        """Return the rows that there are, with their ids; `get_weights` calls this.

        Raises:
            UnsupportedError: they have more than 1 GiB.
        """
        return value_of(self.access, self.path)

    def assign(self, value: object) -> Any:
        """Replace all rows by those of a `RowsById`; `set_weights` calls this."""
        if current_phase() is not None:
            return super().assign(value)
        if not isinstance(value, RowsById):
            return self._value.assign(value)
        self.replace_rows(value.ids, value.rows)
        return value

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NoReturn:
        del dtype, copy
        self._value.read_value()

    def _serialize_to_tensors(self) -> dict[str, TableValue]:
        # A SavedModel has what replaces it instead.
        return {} if current_phase() is not None else values_for_checkpoint(self._value)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: object) -> Any:
        children = super()._trackable_children(save_type, **kwargs)
        replacing = getattr(current_phase(), "table", None)
        if save_type != "savedmodel" or not has_rows(self) or replacing is None:
            return children
        return {**children, "table": replacing(self)}

    def _export_to_saved_model_graph(self, *unused: object, **unused_too: object) -> list[Any]:
        del unused, unused_too
        return []

    def _write_object_proto(self, proto: Any, options: object) -> None:
        # An object that holds others, and no variable, to whoever loads it.
        del options
        proto.user_object.identifier = "_generic_user_object"
        proto.user_object.version.producer = proto.user_object.version.min_consumer = 1

    def _copy_trackable_to_cpu(self, object_map: Any) -> NoReturn:
        del object_map
        raise not_later(self.path)


def has_rows(variable: object) -> bool:
    """Return True for a table of rows, False for a slot or the counts of candidates."""
    begins = variable.rows_of_ids if isinstance(variable, KeyedVariable) else None
    return begins is not None and not isinstance(begins, CountsOfIds)


def _without_gradient(rows: tf.Tensor, name: str) -> tf.Tensor:
    """Return rows whose gradient is refused."""

    @tf.custom_gradient
    def refusing(value: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(*upstream: object) -> Sequence[tf.Tensor]:
            raise no_gradient(name)

        return tf.identity(value), gradient

    return refusing(rows)


def _constant_of(initializer: Any, name: str) -> float:
    kinds = keras.initializers
    if isinstance(initializer, kinds.Zeros):
        return 0.0
    if isinstance(initializer, kinds.Ones):
        return 1.0
    if isinstance(initializer, kinds.Constant) and np.ndim(initializer.value) == 0:
        return float(initializer.value)
    raise UnsupportedError(
        f"The slot '{name}' of a table without a vocabulary begins with each row, so it begins "
        "with a constant. Expected: an optimizer whose slots begin as zeros or another constant. "
        f"Received: the initializer {type(initializer).__name__}. Take another optimizer, such as "
        "Adam or Adagrad."
    )
