"""Rows in a variable on a ps, by their places."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True, eq=False)
class RowStore:
    """The rows of a shard, of a table or of one of its slots, in the variable that holds them.

    A place is the index of a row in that variable, which may hold rows of other tables too.
    """

    holder: tf.Variable
    begin: int  # the place of the shard's first row
    device: str  # the device of the ps

    def gather(self, places: tf.Tensor) -> tf.Tensor:
        """Return the rows at `places`, an integer vector; the ids are not checked.

        Unlike `self.holder[...]`, this reads only these rows. After an update by rows TensorFlow
        copies on read, so a read of the whole variable would copy it.
        """
        return tf.raw_ops.ResourceGather(
            resource=self.holder.handle, indices=places, dtype=self.holder.dtype
        )

    def scatter(self, places: tf.Tensor, rows: tf.Tensor) -> None:
        """Set the rows at `places`, an integer vector of different places."""
        tf.raw_ops.ResourceScatterUpdate(resource=self.holder.handle, indices=places, updates=rows)

    def read(self, rows: range) -> tf.Tensor:
        """Return contiguous rows, counted from the shard's first one, on its ps."""
        with tf.device(self.device):
            return self.gather(tf.range(self.begin + rows.start, self.begin + rows.stop))

    def write(self, rows: range, value: tf.Tensor) -> None:
        """Set contiguous rows of the shard; `rows` as for `read`."""
        with tf.device(self.device):
            tf.raw_ops.ResourceStridedSliceAssign(
                ref=self.holder.handle,
                begin=[self.begin + rows.start],
                end=[self.begin + rows.stop],
                strides=[1],
                value=value,
            )
