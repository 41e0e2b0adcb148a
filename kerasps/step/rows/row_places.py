"""The places, on a ps, of the rows that a step has asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from kerasps.dynamic import AskedKeys
from kerasps.step.rows.groups import ShardRun


class RowPlaces(dict[ShardRun, tf.Tensor | AskedKeys]):
    """The places of the requested rows in the storage of each run of shards, and their numbers.

    Args:
        places: int32 vectors, by the run; of a table without a vocabulary the keys, whose places
            the push finds under its lock.
        lengths: the number of places of each run, one vector for all, in their order; None if it
            is not known.
    """

    def __init__(
        self, places: Mapping[ShardRun, tf.Tensor], lengths: tf.Tensor | None = None
    ) -> None:
        super().__init__(places)
        # For each run, the vector that has its length, and the index there.
        self._lengths: dict[ShardRun, tuple[tf.Tensor, int]] = {}
        if lengths is not None:
            self._lengths = {
                run: (lengths, number)
                for number, (run, asked) in enumerate(places.items())
                if not isinstance(asked, AskedKeys)  # else the length is that of the message
            }

    def add(self, other: RowPlaces) -> None:
        """Add the places in other runs."""
        self.update(other)
        self._lengths.update(other._lengths)

    def counts(self, runs: Sequence[ShardRun]) -> tf.Tensor:
        """Return the number of requested rows of each of `runs`, as an int32 vector.

        A ps takes longer to compute the sizes of many short vectors than to receive them.
        """
        known = [self._lengths[run] for run in runs if run in self._lengths]
        lengths, first = known[0] if known else (None, 0)
        numbers = [number for vector, number in known if vector is lengths]
        if lengths is None or numbers != list(range(first, first + len(runs))):
            return tf.stack([_number(self[run]) for run in runs])
        return lengths[first : first + len(runs)]

    def number(self, runs: Sequence[ShardRun]) -> tf.Tensor:
        """Return the number of requested rows of `runs` together."""
        return _number(self[runs[0]]) if len(runs) == 1 else tf.reduce_sum(self.counts(runs))

    def resolved(self, held: tf.Tensor | None = None) -> RowPlaces:
        """Return the places of rows to update; make missing ones. On the ps, under its lock.

        Args:
            held: how many earlier pushes have rows that must stay (see `AskedKeys`).
        """
        places = RowPlaces(
            {
                run: run.places(
                    asked._replace(held=held) if isinstance(asked, AskedKeys) else asked
                )
                for run, asked in self.items()
            }
        )
        places._lengths = dict(self._lengths)
        return places


def _number(asked: tf.Tensor | AskedKeys) -> tf.Tensor:
    return tf.size(asked.keys if isinstance(asked, AskedKeys) else asked)
