"""Candidates on a ps: ids of a table without a vocabulary that have a count, and no row yet.

Their counts are rows of one element in a pool of their own, under the keys of the table. So files
have them as they have other tables. A push counts under the lock, in its lane, so exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.admission import Admission, CountAdmission, ProbabilityAdmission, drawn
from kerasps.dynamic.ids.keys import unmixed
from kerasps.dynamic.parts.terms import (
    AskedKeys,
    Field,
    Holder,
    TableTerms,
    of_tables,
    place_of_field,
    salt_in_pool,
    some,
)
from kerasps.variables.rows.row_store import RowStore
from kerasps.variables.storage.named import NamedVariable

_Kind = TypeVar("_Kind", bound=Admission)


class Part(Protocol):
    """The part of a pool that has rows (see `KeyPart`)."""

    rows: NamedVariable

    @property
    def counts(self) -> Part | None: ...

    def store(self, holder: NamedVariable) -> RowStore: ...

    def made(self, tables: Sequence[TableTerms], asked: AskedKeys) -> tf.Tensor: ...

    def remove_at(
        self, holders: Sequence[Holder], places: tf.Tensor, local: tf.Tensor | None
    ) -> tf.Tensor: ...

    def add_to_numbers(self, at: Sequence[int], changes: tf.Tensor) -> tf.Operation: ...


def admitted(part: Part, tables: Sequence[TableTerms], new: AskedKeys) -> tf.Tensor:
    """Return whether each of some keys without rows gets one now. Call under the lock.

    The gradients of the others are counted as dropped.
    """
    if part.counts is not None and tables[0].counts is not None:
        is_admitted = _by_counts(part.counts, tables, new)
    else:
        in_pool = of_tables(
            [salt_in_pool(table.number) for table in tables], new.table_of, np.int64
        )
        salts = of_tables([table.salt for table in tables], new.table_of, np.int64)
        bounds = [_admission(table, ProbabilityAdmission).bound for table in tables]
        bound = of_tables(bounds, new.table_of, np.int64)
        is_admitted = drawn(unmixed(new.keys) - in_pool, salts) < bound
    dropped = tf.cast(~is_admitted, tf.int64)
    which = tf.zeros_like(new.keys, tf.int32) if new.table_of is None else new.table_of
    add = part.add_to_numbers(
        [place_of_field(table.number, Field.DROPPED) for table in tables],
        tf.math.unsorted_segment_sum(dropped, which, len(tables)),
    )
    with tf.control_dependencies([add]):
        return tf.identity(is_admitted)


def _by_counts(part: Part, tables: Sequence[TableTerms], new: AskedKeys) -> tf.Tensor:
    """Count each key once more; return whether it has come often enough, and forget it then."""
    counting = [table.counts for table in tables if table.counts is not None]
    places = part.made(counting, new)
    store = part.store(part.rows)
    # A key that found no room is met for the first time, as far as anyone knows.
    before = tf.where(places > 0, store.gather(places)[:, 0], 0)
    bounds = [_admission(table, CountAdmission).n for table in tables]
    counts = before + 1
    is_admitted = counts >= of_tables(bounds, new.table_of, np.int32)
    remains = tf.where(~is_admitted & (places > 0))[:, 0]
    ends = tf.where(is_admitted & (places > 0))[:, 0]
    write = tf.raw_ops.ResourceScatterUpdate(
        resource=part.rows.handle,
        indices=tf.gather(places, remains),
        updates=tf.gather(counts, remains)[:, None],
    )
    with tf.control_dependencies([write]):
        removed = part.remove_at(
            [table.holder for table in counting],
            tf.gather(places, ends),
            some(new.table_of, ends),
        )
    with tf.control_dependencies([removed]):
        return tf.identity(is_admitted)


def _admission(table: TableTerms, kind: type[_Kind]) -> _Kind:
    assert isinstance(table.admission, kind)
    return table.admission
