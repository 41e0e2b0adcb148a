"""Rows of a storage that tables share, in the place of a variable for each table."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasps import _compat
from kerasps.variables.named import NamedVariable, on_own_task, plain_variable
from kerasps.variables.tensor_like import TensorLike, new_value

if TYPE_CHECKING:
    from kerasps.variables.row_pools import RowPool


class PooledRows(TensorLike):
    """Some rows of a variable on a ps, in the place of a `tf.Variable` with these rows.

    Whatever reads or writes it, by all rows or by some, sees no others. Indices count from its
    first row; those out of its range are an error, as they are for a variable.

    Args:
        holder: the variable that holds them.
        rows: which of its rows they are.
        pool: what has made them; they keep it.
        trainable: as for `tf.Variable`.
        name: the name in messages; need not be unique.

    Attributes:
        holder: as given.
        begin: the first of its rows.
        pool: as given.
        takes_values: whether what this process assigns outside of steps is written.
        watched: the holder twice more: some of these rows are read as from the one, all of them as
            from the other. By these a GradientTape knows them from others.
    """

    def __init__(
        self, holder: NamedVariable, rows: range, pool: RowPool, *, trainable: bool, name: str
    ) -> None:
        self.holder = holder
        self.takes_values = holder.takes_values
        self.begin = rows.start
        self.pool = pool
        self.trainable = trainable
        self._num_rows = len(rows)
        self._name = f"{name}:0"
        self._unique_id = uuid.uuid4().hex
        self._adder: Any = None
        with tf.init_scope():
            self.watched = [on_own_task(self._make_view) for _ in range(2)]
        self._by_rows, self._as_whole = self.watched

    def _make_view(self) -> tf.Variable:
        """Return another variable that is the holder."""
        holder = self.holder
        with tf.device(self.device):
            handle = tf.raw_ops.VarHandleOp(
                dtype=holder.dtype,
                shape=holder.shape,
                container="",
                shared_name=holder.shared_name,
            )
        handle._name, handle._unique_id = self._name, self._unique_id
        _compat.set_handle_data(handle, _compat.create_handle_data(holder.shape, holder.dtype))
        # A graph that captures it finds the holder by its name.
        handle.named_variable = weakref.ref(holder)
        return _compat.ResourceVariable(
            trainable=self.trainable, shape=holder.shape, dtype=holder.dtype, handle=handle
        )

    @property
    def name(self) -> str:
        """The name in messages."""
        return self._name

    @property
    def _shared_name(self) -> str:
        return self._name.removesuffix(":0")

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the elements."""
        return self.holder.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of these rows together."""
        return tf.TensorShape([self._num_rows, *self.holder.shape[1:]])

    @property
    def device(self) -> str:
        """The device of the holder."""
        return str(self.holder.device)

    def read_value(self) -> tf.Tensor:
        """Return all rows."""
        value = on_own_task(lambda: self._read(self._as_whole, self._places()), is_repeatable=True)
        value.set_shape(self.shape)
        return value

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Return the rows `indices`, of shape `indices.shape + shape[1:]`; `tf.gather` calls it."""
        del name
        return on_own_task(
            lambda: self._read(self._by_rows, self._checked(indices)), is_repeatable=True
        )

    def _read(self, view: tf.Variable, places: tf.Tensor) -> tf.Tensor:
        """Return rows of the holder, read as from one of `watched`."""
        if tf.executing_eagerly():
            return view.sparse_read(places)
        # A graph has operations on one handle wait for each other, and this is not that of what
        # writes.
        with tf.control_dependencies([self._touch()]):
            rows = view.sparse_read(places)
        with tf.control_dependencies([rows]):
            self._touch()
        return rows

    def _touch(self) -> tf.Tensor:
        with tf.device(self.device):
            return tf.raw_ops.VarIsInitializedOp(resource=self.holder.handle)

    def assign(self, value: object, *unused: object, **unused_too: object) -> PooledRows:
        """Set all rows."""
        value = new_value(self, value)
        on_own_task(lambda: assign_rows(self, range(self._num_rows), value), is_repeatable=True)
        return self

    def assign_add(self, value: object, *unused: object, **unused_too: object) -> PooledRows:
        """Add a value of the shape of these rows; atomic."""
        value = new_value(self, value)
        if not tf.executing_eagerly():
            self._add(value)
            return self
        if self._adder is None:
            # By itself, the operation finds no shape in a handle of another machine.
            self._adder = tf.function(self._add, autograph=False)
        adder = self._adder

        def add() -> None:
            with tf.device(self.device):
                adder(value)

        on_own_task(add)
        return self

    def _add(self, value: tf.Tensor) -> tf.Tensor:
        with tf.device(self.device):
            tf.raw_ops.ResourceScatterNdAdd(
                ref=self.holder.handle,
                indices=self._places()[:, None],
                updates=value,
                use_locking=True,
            )
            # A remote call that returns nothing is not waited for.
            return tf.constant(0)

    def assign_sub(self, value: object, *unused: object, **unused_too: object) -> PooledRows:
        """Subtract a value of the shape of these rows; atomic."""
        return self.assign_add(-new_value(self, value))

    def scatter_add(self, slices: tf.IndexedSlices) -> PooledRows:
        """Add slices to their rows."""
        return self._scatter(tf.raw_ops.ResourceScatterAdd, slices)

    def scatter_sub(self, slices: tf.IndexedSlices) -> PooledRows:
        """Subtract slices from their rows."""
        return self._scatter(tf.raw_ops.ResourceScatterSub, slices)

    def scatter_update(self, slices: tf.IndexedSlices) -> PooledRows:
        """Put slices in the place of their rows."""
        return self._scatter(tf.raw_ops.ResourceScatterUpdate, slices)

    def _scatter(self, operation: Callable[..., object], slices: tf.IndexedSlices) -> PooledRows:
        def write() -> None:
            places = self._checked(slices.indices)
            with tf.device(self.device):
                values = tf.cast(slices.values, self.dtype)
                operation(resource=self.holder.handle, indices=places, updates=values)

        on_own_task(write)
        return self

    def own_gradient(
        self,
        by_rows: tf.Tensor | tf.IndexedSlices | None,
        as_whole: tf.Tensor | tf.IndexedSlices | None,
    ) -> Any:
        """Return the gradient of these rows; None where there is none.

        Args:
            by_rows: what a GradientTape has found for the first of `watched`.
            as_whole: for the second.
        """
        if as_whole is None:
            return None if by_rows is None else self._own_slices(by_rows)
        dense = tf.convert_to_tensor(self._own_slices(as_whole))
        return dense if by_rows is None else dense + tf.convert_to_tensor(self._own_slices(by_rows))

    def _own_slices(self, gradient: tf.Tensor | tf.IndexedSlices) -> Any:
        """Return a gradient of the holder that has none but these rows as one of them."""
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient[self.begin : self.begin + self._num_rows]
        places = gradient.indices - tf.constant(self.begin, gradient.indices.dtype)
        shape = tf.constant(self.shape.as_list(), places.dtype)
        return tf.IndexedSlices(gradient.values, places, shape)

    def _places(self) -> tf.Tensor:
        """Return the places of all rows in the holder."""
        with tf.device(self.device):
            return tf.range(self.begin, self.begin + self._num_rows)

    def _checked(self, indices: tf.Tensor) -> tf.Tensor:
        """Return the places of the rows `indices` in the holder.

        Raises:
            tf.errors.InvalidArgumentError: they are out of range: the rows there are another's.
        """
        indices = tf.convert_to_tensor(indices)
        with tf.device(self.device):
            indices = tf.cast(indices, tf.int64)
            is_in_range = (indices >= 0) & (indices < self._num_rows)
            check = tf.debugging.Assert(
                tf.reduce_all(is_in_range),
                [
                    f"'{self.name}' has {self._num_rows} rows. Expected: indices in "
                    f"[0, {self._num_rows}). Received:",
                    tf.boolean_mask(indices, ~is_in_range),
                ],
            )
            # Done already where there is no graph.
            with tf.control_dependencies([check] if check is not None else []):
                return tf.identity(indices) + self.begin

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        # For a checkpoint that is written while training goes on.
        with tf.device(self.device):
            if self not in object_map:
                object_map[self] = plain_variable(
                    initial_value=self.read_value(), trainable=self.trainable, name=self._name
                )
            else:
                object_map[self].assign(self.read_value())

    def __repr__(self) -> str:
        return f"<PooledRows '{self.name}' shape={self.shape} dtype={self.dtype.name}>"


def held_by(storage: tf.Variable | PooledRows) -> tuple[Any, int]:
    """Return the `tf.Variable` that holds the rows of a shard, and the place of the first of them.

    Args:
        storage: a `tf.Variable`, which holds its own, or `PooledRows`.
    """
    if isinstance(storage, PooledRows):
        return storage.holder, storage.begin
    return storage, 0


def assign_rows(shard: tf.Variable | PooledRows, places: range, value: tf.Tensor) -> None:
    """Assign contiguous rows of a shard.

    Args:
        shard: a `tf.Variable` or `PooledRows`.
        places: their places in the shard, with a step of 1.
        value: their new value.
    """
    holder, begin = held_by(shard)
    with tf.device(shard.device):
        tf.raw_ops.ResourceStridedSliceAssign(
            ref=holder.handle,
            begin=[begin + places.start],
            end=[begin + places.stop],
            strides=[1],
            value=value,
        )
