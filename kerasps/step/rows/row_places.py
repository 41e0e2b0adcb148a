"""The places of the rows that a step has asked for, on a ps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from kerasps.step.rows.groups import ShardRun


class RowPlaces(dict[ShardRun, tf.Tensor]):
    """The places of the rows in what holds each run of shards, and how many they are.

    Args:
        places: int32 vectors, by the run.
        lengths: how many places there are of each run, a vector for all, in their order; None
            where that is not at hand.
    """

    def __init__(
        self, places: Mapping[ShardRun, tf.Tensor], lengths: tf.Tensor | None = None
    ) -> None:
        super().__init__(places)
        # Each length as a vector and a place in that.
        self._lengths: dict[ShardRun, tuple[tf.Tensor, int]] = {}
        if lengths is not None:
            self._lengths = {run: (lengths, number) for number, run in enumerate(places)}

    def add(self, other: RowPlaces) -> None:
        """Take in the places in other runs."""
        self.update(other)
        self._lengths.update(other._lengths)

    def counts(self, runs: Sequence[ShardRun]) -> tf.Tensor:
        """Return how many rows of each of some runs were asked for, as an int32 vector.

        The sizes of many short vectors take a ps longer to find than to be told.
        """
        known = [self._lengths[run] for run in runs if run in self._lengths]
        lengths, first = known[0] if known else (None, 0)
        numbers = [number for vector, number in known if vector is lengths]
        if lengths is None or numbers != list(range(first, first + len(runs))):
            return tf.stack([tf.size(self[run]) for run in runs])
        return lengths[first : first + len(runs)]
