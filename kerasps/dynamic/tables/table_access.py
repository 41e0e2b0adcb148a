"""Finds, makes, counts and removes the rows of a table without a vocabulary, from this process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from kerasps.dynamic.parts.figures import figures_of, num_without_row
from kerasps.dynamic.parts.key_part import PIECE, KeyPart
from kerasps.dynamic.parts.keyed_rows import KeyedStorage
from kerasps.dynamic.policies.gone import gone_since
from kerasps.dynamic.policies.terms import AskedKeys, Field, Holder, TableTerms
from kerasps.dynamic.policies.usage import last_use, remove_unused, set_tick
from kerasps.runtime.calls import persist
from kerasps.runtime.fetching import fetch
from kerasps.runtime.on_ps import OnPS, call_on_each


@dataclass(frozen=True)
class Located:
    """The parts that have some ids.

    Attributes:
        parts: the numbers of these parts.
        places: for each, the places of its ids among those given.
        keys: for each, the keys of its ids.
    """

    parts: list[int]
    places: list[np.ndarray]
    keys: list[np.ndarray]


class TableAccess:
    """Finds, makes and removes the rows of a table by their ids. Call outside of steps.

    Its functions are traced once for the table and its slots. Thread: any.
    """

    def __init__(self, storage: KeyedStorage) -> None:
        # Not the storage or the table, which keep this object alive.
        self._shards: tuple[KeyPart, ...] = tuple(rows.part for rows in storage.shards)
        self._mutex = storage.shards[0].pool.mutex
        self._holder = storage.table.holder
        self._makers: tuple[TableTerms, list[OnPS]] | None = None

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return len(self._shards)

    def sorted_ids(self) -> np.ndarray:
        """Return the ids of the table, ascending."""
        found = [np.zeros(0, np.int64)]
        for span, read in self._id_readers:
            found += [read.call(first, PIECE)[0] for first in called_range(span, PIECE)]
        return np.sort(np.concatenate(found))

    def num_rows(self) -> int:
        """Return the number of rows of the table, on all ps."""
        return int(self.figures()[Field.ROWS])

    def num_without_row(self, located: Located) -> int:
        """Return how many of some ids have no row."""
        return sum(
            int(self._missing[part].call(keys)[0])
            for part, keys in zip(located.parts, located.keys, strict=True)
        )

    def make(self, terms: TableTerms, located: Located) -> list[np.ndarray]:
        """Return the places of rows in each part; make those that are missing.

        The place of a row that a part has no room for is 0.
        """
        # A file may have rows that are spread less evenly than `max_rows` is.
        terms = replace(terms, max_rows=None, admission=None)
        if self._makers is None or self._makers[0] != terms:
            self._makers = terms, [self._maker(part, terms) for part in self._shards]
        makers = self._makers[1]
        # A second call makes nothing.
        return persist(
            lambda: fetch(
                [
                    makers[part].start(keys)[0]
                    for part, keys in zip(located.parts, located.keys, strict=True)
                ]
            )
        )

    def remove(self, located: Located) -> int:
        """Remove rows; return how many there were."""
        return sum(
            int(self._removers[part].call(keys)[0])
            for part, keys in zip(located.parts, located.keys, strict=True)
        )

    def figures(self) -> np.ndarray:
        """Return the numbers of the table, summed over its parts, `[len(Field)]`."""
        fields: np.ndarray = np.stack(call_on_each(self._counters)).sum(0)
        return fields

    def gone_since(self, since: Sequence[int]) -> list[list[np.ndarray]]:
        """Return, for each part, what `gone.gone_since` returns.

        Args:
            since: for each part, the number of removed ids that are known.
        """
        return [read.call(known) for read, known in zip(self._gone_readers, since, strict=True)]

    def remove_unused(self, terms: TableTerms, age: int, *, by_clock: bool) -> int:
        """Remove rows whose last use was longer ago; return how many there were."""
        number, removed = tf.TensorSpec([], tf.int64), 0
        for part in self._shards:
            remove = OnPS(
                part.device,
                functools.partial(remove_unused, part, terms, by_clock),
                *(number, number, number),
                mutex=self._mutex(part.device),
            )
            for first in called_range(spanning(part, self._holder), PIECE):
                # It counts what it removes, and so must not run twice.
                removed += int(remove.run_once(age, first, PIECE)[0])
        return removed

    def set_ticks(self, terms: TableTerms) -> None:
        """Let the ticks of all parts go on from the last use of a row that was loaded."""
        place, mutex, holder = tf.TensorSpec([], tf.int64), self._mutex, self._holder
        last = 0
        for part in self._shards:
            read = OnPS(part.device, functools.partial(last_use, part, terms), place, place)
            places = called_range(spanning(part, holder), PIECE)
            last = max([last, *(int(read.call(first, PIECE)[0]) for first in places)])
        for part in self._shards:
            write = functools.partial(set_tick, part, holder)
            OnPS(part.device, write, place, mutex=mutex(part.device)).call(last)

    @functools.cached_property
    def _counters(self) -> list[OnPS]:
        number = self._holder.number
        return [OnPS(p.device, functools.partial(figures_of, p, number)) for p in self._shards]

    @functools.cached_property
    def _gone_readers(self) -> list[OnPS]:
        spec, holder, mutex = tf.TensorSpec([], tf.int64), self._holder, self._mutex
        return [
            OnPS(p.device, functools.partial(gone_since, p, holder), spec, mutex=mutex(p.device))
            for p in self._shards
        ]

    @functools.cached_property
    def _missing(self) -> list[OnPS]:
        spec, number = tf.TensorSpec([None], tf.int64), self._holder.number
        return [
            OnPS(p.device, functools.partial(num_without_row, p, number), spec)
            for p in self._shards
        ]

    @functools.cached_property
    def _id_readers(self) -> list[tuple[OnPS, OnPS]]:
        spec, holder = tf.TensorSpec([], tf.int64), self._holder

        def reader(part: KeyPart) -> OnPS:
            def read(first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
                return part.piece(holder, first, count)[1]

            return OnPS(part.device, read, spec, spec)

        return [(spanning(part, holder), reader(part)) for part in self._shards]

    @functools.cached_property
    def _removers(self) -> list[OnPS]:
        spec, holder = tf.TensorSpec([None], tf.int64), self._holder

        def remover(part: KeyPart) -> OnPS:
            def remove(keys: tf.Tensor) -> tf.Tensor:
                return part.remove_keys(holder, keys)

            return OnPS(part.device, remove, spec, mutex=self._mutex(part.device))

        return [remover(part) for part in self._shards]

    def _maker(self, part: KeyPart, terms: TableTerms) -> OnPS:
        def make(keys: tf.Tensor) -> tf.Tensor:
            return part.made([terms], AskedKeys(keys), is_push=False)

        spec = tf.TensorSpec([None], tf.int64)
        return OnPS(part.device, make, spec, mutex=self._mutex(part.device))


def spanning(part: KeyPart, holder: Holder) -> OnPS:
    """Return a function that returns the first place of a table's rows, and the end of these."""
    return OnPS(part.device, functools.partial(part.span, holder))


def called_range(span: OnPS, step: int) -> range:
    """Return every `step`-th place of a table, given its `spanning`."""
    first, end = (int(number) for number in span.call()[0])
    return range(first, end, step)
