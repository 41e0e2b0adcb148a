"""Rows of ids in ordinary weights of a layer, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import mixed
from kerasps.dynamic.ids.rows_of_ids import RowsOfIds, check_different
from kerasps.dynamic.local.local_rows import LocalRows, LocalSlot, assign, numbers, scatter
from kerasps.errors import InputError

# The number of places of a table without `max_rows`: 64 MB for rows of 16 float32.
DEFAULT_PLACES = 1_000_000


class LocalPlaces(tf.Module):
    """Finds rows of ids in ordinary weights of a layer.

    The rows are in places 0, 1, … without holes. All state is in weights, so whatever restores the
    weights of a model restores its tables: the rows by place, the id of each place, the number of
    rows, and a digest of ids and places. A hash table from id to place is an index of them. It is
    made anew when its digest is another than that of the weights.

    Args:
        add_weight: the method of the layer.
        initializer: makes first rows, and knows `max_rows`.
        regularizer: the regularizer of the rows. Places without a row are zeros.
        name: the name of the weight with the rows. Other names begin with it, but for
            `"embeddings"`.

    Attributes:
        rows: the weight with the rows, of shape `[places, width]`.
        num_places: the number of places.
        index: the hash table.
    """

    def __init__(
        self,
        add_weight: Callable[..., keras.Variable],
        initializer: RowsOfIds,
        regularizer: object = None,
        *,
        name: str = "embeddings",
        trainable: bool = True,
    ) -> None:
        super().__init__()
        self._initializer = initializer
        self.num_places = initializer.most_rows_on_ps(1, 0) or DEFAULT_PLACES
        self._width = initializer.first_rows.width
        prefix = "" if trainable else f"{name}_"

        def add_state(name: str, shape: tuple[int, ...]) -> Any:
            # The aggregation makes it one variable for all replicas of a CentralStorageStrategy.
            return add_weight(
                name=prefix + name,
                shape=shape,
                dtype="int64",
                initializer="zeros",
                trainable=False,
                aggregation="only_first_replica",
            )

        kind = {} if trainable else {"dtype": "int32", "aggregation": "only_first_replica"}
        self.rows = add_weight(
            name=name,
            shape=(self.num_places, self._width),
            initializer="zeros",
            regularizer=regularizer,
            trainable=trainable,
            # Converted to another dtype, all of it would be read in each step.
            autocast=False,
            **kind,
        )
        # Files have it by id, as on ps.
        self.rows.__class__, self.rows.table = LocalRows, self
        self._ids = add_state("ids", (self.num_places,))
        self._num_rows = add_state("num_rows", ())
        self._digest = add_state("digest", ())
        with tf.init_scope(), tf.device("CPU:0"):
            self.index = tf.lookup.experimental.MutableHashTable(
                tf.int64, tf.int64, -1, experimental_is_anonymous=True
            )
            self._indexed = numbers()

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self._num_rows.numpy())

    @property
    def num_rows_now(self) -> tf.Tensor:
        """The number of rows, as a tensor."""
        return tf.convert_to_tensor(self._num_rows.value)

    def row_items(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over ids and their rows, in the order of their places, `batch` at a time."""
        for start in range(0, self.num_rows, batch):
            places = tf.range(start, min(start + batch, self.num_rows))
            ids, rows = (tf.gather(state.value, places) for state in (self._ids, self.rows))
            yield np.asarray(ids), np.asarray(rows)

    def some_norms(self, most: int) -> np.ndarray:
        """Return the norms of up to `most` rows, drawn at random."""
        places = np.random.default_rng().permutation(self.num_rows)[:most]
        rows = np.asarray(tf.gather(self.rows.value, places), np.float32)
        return np.asarray(np.linalg.norm(rows, axis=1))

    def keep(self, slot: LocalSlot) -> None:
        """Let the rows of a slot move with those of the table."""
        raise NotImplementedError

    def sorted_ids(self) -> np.ndarray:
        """Return the ids, ascending."""
        return np.sort(np.asarray(self._ids.value[: self.num_rows]))

    def replace_rows(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Replace all rows of the table.

        Args:
            ids: a vector of different ids.
            rows: their rows.

        Raises:
            InputError: there are not enough places, or an id is there twice; nothing is changed.
        """
        self.check(ids)
        numbers = tf.range(len(ids), dtype=tf.int64)
        keys = tf.constant(ids, tf.int64)
        for state in (self.rows, self._ids):
            state.assign(tf.zeros(state.shape, state.dtype))
        scatter(self.rows, numbers, rows)
        scatter(self._ids, numbers, keys)
        self._num_rows.assign(len(ids))
        self._digest.assign(digest_of(keys, numbers))

    def check(self, ids: np.ndarray) -> None:
        """Raise `InputError` if these ids cannot be all of the table."""
        check_different(ids)
        self._check_room(len(ids))

    def _check_room(self, num_rows: int) -> None:
        if num_rows > self.num_places:
            raise InputError(
                "A table of a DynamicEmbedding has no room for all rows. Expected: at most "
                f"{self.num_places:,} rows. Received: {num_rows:,}. Make the layer with "
                f"max_rows={num_rows} or more."
            )

    def renew_index(self) -> None:
        """Make the index anew if the weights were assigned from elsewhere."""
        digest = tf.convert_to_tensor(self._digest.value)

        def renew() -> tf.Tensor:
            ids = self._ids.value[: self._num_rows.value]
            tf.raw_ops.LookupTableImportV2(
                table_handle=self.index.resource_handle,
                keys=ids,
                values=tf.range(tf.size(ids, tf.int64)),
            )
            assign(self._indexed, digest)
            return tf.constant(True)

        tf.cond(tf.equal(digest, self._indexed), lambda: tf.constant(False), renew)

    def places(self, ids: tf.Tensor) -> tf.Tensor:
        """Return the places of a vector of ids, -1 for an id without a row."""
        places = self.index.lookup(ids)
        places.set_shape(ids.shape)
        return places

    def append(self, ids: tf.Tensor) -> tf.Tensor:
        """Make the rows of different ids that have none; return the number of rows then."""
        before = self.num_rows_now
        after = before + tf.size(ids, tf.int64)
        numbers = tf.range(before, after)
        self.write(numbers, self._initializer.rows(ids), ids)
        self.index.insert(ids, numbers)
        self.set_size(after, digest_of(ids, numbers))
        return after

    def ids_at(self, places: tf.Tensor) -> tf.Tensor:
        """Return the ids at places."""
        return tf.gather(self._ids.value, places)

    def write(self, places: tf.Tensor, rows: tf.Tensor, ids: tf.Tensor | None = None) -> None:
        """Write rows at places, and their ids if given."""
        scatter(self.rows, places, rows)
        if ids is not None:
            scatter(self._ids, places, ids)

    def set_size(self, num_rows: tf.Tensor, change: tf.Tensor) -> None:
        """Set the number of rows; add `change` to the digest, which is then that of the index."""
        digest = self._digest.value + change
        assign(self._num_rows, num_rows)
        assign(self._digest, digest)
        assign(self._indexed, digest)


def digest_of(ids: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Return the sum, over rows, of a number that follows from id and place."""
    return tf.reduce_sum(mixed(mixed(ids) + places))
