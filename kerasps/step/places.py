"""Which rows of the shards on a ps a step has asked for, there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from kerasps.variables import Shard


class RowPlaces(dict[Shard, tf.Tensor]):
    """The places of the rows in each shard of a table, and how many they are.

    Args:
        places: int32 vectors, by the shard.
        lengths: how many places there are of each shard, a vector for all, in their order; None
            where that is not at hand.
    """

    def __init__(self, places: Mapping[Shard, tf.Tensor], lengths: tf.Tensor | None = None) -> None:
        super().__init__(places)
        # Each length as a vector and a place in that.
        self._lengths: dict[Shard, tuple[tf.Tensor, int]] = {}
        if lengths is not None:
            self._lengths = {shard: (lengths, number) for number, shard in enumerate(places)}

    def add(self, other: RowPlaces) -> None:
        """Take in the places in other shards."""
        self.update(other)
        self._lengths.update(other._lengths)

    def counts(self, shards: Sequence[Shard]) -> tf.Tensor:
        """Return how many rows of each of some shards were asked for, as an int32 vector.

        The sizes of many short vectors take a ps longer to find than to be told.
        """
        known = [self._lengths[shard] for shard in shards if shard in self._lengths]
        lengths, first = known[0] if known else (None, 0)
        numbers = [number for vector, number in known if vector is lengths]
        if lengths is None or numbers != list(range(first, first + len(shards))):
            return tf.stack([tf.size(self[shard]) for shard in shards])
        return lengths[first : first + len(shards)]
