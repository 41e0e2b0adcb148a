"""Tables without a vocabulary and requests for their rows, as a part on a ps knows them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.admission import Admission
from kerasps.dynamic.ids.eviction import Eviction
from kerasps.dynamic.ids.first_rows import FirstRows
from kerasps.dynamic.ids.keys import from_halves, halves, salt_of, unmixed

# A tag has the number of a table and, in these lowest bits, the number of the newest slot that the
# row has begun.
SLOT_BITS = 16
MOST_TABLES = 2**12 - 1
# The tag of a place that no row has.
NO_TABLE = -1
# The error of a key that ids of two tables have.
MEETING = "Two tables without a vocabulary have ids that meet in one key."
# In the numbers of a part: the first shared place that no row had yet; how many shared places were
# given back; when the part was made, in microseconds; the version of its rows, and how many were
# removed (see `stamps.py`); then the fields of each table.
TOP, NUM_FREE, BORN, VERSION, REMOVED, _HEADER = 0, 1, 2, 3, 4, 5


class Field(enum.IntEnum):
    """The numbers that a part keeps of a table."""

    ROWS = 0  # rows that there are
    MADE = 1  # rows that were made
    REFUSED = 2  # times that there was no room for a row
    DROPPED = 3  # gradients of ids that were not admitted
    EVICTED = 4  # rows that were given up, or whose places others took
    # Of tables with a region:
    USED = 5  # places that a row has had
    FREE = 6  # places that were given back
    # Of tables with eviction:
    TICK = 7  # pushes
    ASKED = 8  # ids that pushes had, each once a push
    REMADE = 9  # rows that were given up between a pull and the push that makes them again
    AGES = 10  # the sum of the ticks since the last use of each row that was given up
    GONE = 11  # rows that were removed, and told (see `gone.py`)


def place_of_field(number: int, field: Field) -> int:
    """Return the index, in the numbers of a part, of a field of a table."""
    return _HEADER + len(Field) * number + field


NUM_NUMBERS = place_of_field(MOST_TABLES, Field.ROWS)


def first_numbers() -> tf.Tensor:
    """Return the numbers of a part that is new."""
    # Place 0 is no key's.
    header = tf.stack([1, 0, tf.cast(tf.timestamp() * 1e6, tf.int64), 0, 0])
    return tf.concat([header, tf.zeros([NUM_NUMBERS - _HEADER], tf.int64)], 0)


class Region(NamedTuple):
    """Places that a table has to itself, the same in each part.

    Attributes:
        first: the first place.
        size: how many.
        replaces: whether a new row replaces another when the region is full.
    """

    first: int
    size: int
    replaces: bool


class Holder(NamedTuple):
    """The owner of rows in a part.

    Attributes:
        number: the number of the table in its pool.
        region: the places of the table; None if it shares those of the part.
    """

    number: int
    region: Region | None


class AskedKeys(NamedTuple):
    """The rows that a step asks for in one part.

    Attributes:
        keys: different keys, table by table.
        table_of: int32: the index of the table of each key, among those of the run; None if there
            is one table.
        had_row: whether each key had a row when the step pulled it; None if that is not known.
    """

    keys: tf.Tensor
    table_of: tf.Tensor | None = None
    had_row: tf.Tensor | None = None

    @classmethod
    def of(cls, sent: tf.Tensor, num_tables: int, had_row: tf.Tensor | None = None) -> AskedKeys:
        """Return what a worker has sent."""
        if num_tables == 1:
            return cls(from_halves(sent), None, had_row)
        size = tf.size(sent) // 3
        return cls(from_halves(sent[size:]), sent[:size], had_row)

    @property
    def which(self) -> tf.Tensor:
        """The index of the table of each key, also of one table."""
        return tf.zeros_like(self.keys, tf.int32) if self.table_of is None else self.table_of

    def some(self, indices: tf.Tensor) -> AskedKeys:
        """Return some of them."""
        return AskedKeys(tf.gather(self.keys, indices), some(self.table_of, indices))

    def sent(self) -> tf.Tensor:
        """Return them as a worker sends them: end to end, as int32."""
        keys = halves(self.keys)
        return keys if self.table_of is None else tf.concat([self.table_of, keys], 0)


@dataclass(frozen=True)
class TableTerms:
    """A table, as a part knows it.

    Attributes:
        number: the number of the table in its pool.
        first_rows: makes first rows.
        salt: the salt of the seed of first rows.
        max_rows: the most rows in this part; None for no limit but the room of the part.
        slots: the slots that it has now, in the order in which they were made.
        region: the places that it has to itself; None if it shares those of the part.
        admission: decides which ids get rows; None for all.
        counts: the table of the counts of ids that may get rows; None if none are counted.
        reads_zeros: whether an id without a row reads zeros, and not its first row.
        eviction: the rule by which rows are given up; None for none.
        least: the rows of this part that are not given up.
        usage: the slot that has the use of each row; None without eviction.
    """

    number: int
    first_rows: FirstRows
    salt: np.int64
    max_rows: int | None
    slots: tuple[SlotTerms, ...]
    region: Region | None = None
    admission: Admission | None = None
    counts: TableTerms | None = None
    reads_zeros: bool = False
    eviction: Eviction | None = None
    least: int = 0
    usage: SlotTerms | None = None

    @property
    def holder(self) -> Holder:
        """The table as an owner of rows."""
        return Holder(self.number, self.region)

    @property
    def most(self) -> int:
        """The most rows of a table with a region."""
        assert self.region is not None
        size = self.region.size
        return size if self.max_rows is None else min(self.max_rows, size)


@dataclass(frozen=True)
class SlotTerms:
    """A slot of a table, as a part knows it.

    Attributes:
        number: its number among all slots that the table ever had, from 1.
        dtype: the dtype of its rows.
        begins_as: the value of each element before the first update.
        width: the number of elements of its rows; None for that of the table.
    """

    number: int
    dtype: tf.DType
    begins_as: float
    width: int | None = None


def salt_in_pool(number: int) -> np.int64:
    """Return what is added to the ids of a table before they are mixed to keys."""
    return np.int64(0) if number == 0 else salt_of(number)


def first_rows(tables: Sequence[TableTerms], keys: tf.Tensor, local: tf.Tensor | None) -> tf.Tensor:
    """Return the first rows of keys of tables whose first rows are made alike."""
    in_pool = of_tables([salt_in_pool(table.number) for table in tables], local, np.int64)
    salts = of_tables([table.salt for table in tables], local, np.int64)
    return tables[0].first_rows(unmixed(keys) - in_pool, salts)


def default_rows(
    tables: Sequence[TableTerms], keys: tf.Tensor, local: tf.Tensor | None
) -> tf.Tensor:
    """Return what keys without rows read."""
    rows = first_rows(tables, keys, local)
    # Tables of a group are alike in this.
    return tf.zeros_like(rows) if tables[0].reads_zeros else rows


def newest_of(table: TableTerms) -> int:
    """Return the number of the newest slot of a table, 0 for none."""
    return table.slots[-1].number if table.slots else 0


def slots_of(
    tables: Sequence[TableTerms],
) -> dict[tuple[tf.DType, int, int | None], dict[int, float]]:
    """Return the slots of tables, and for each the tables that have it, with what it begins as."""
    slots: dict[tuple[tf.DType, int, int | None], dict[int, float]] = {}
    for index, table in enumerate(tables):
        for slot in table.slots:
            slots.setdefault((slot.dtype, slot.number, slot.width), {})[index] = slot.begins_as
    return slots


def of_tables(values: Sequence[Any], local: tf.Tensor | None, dtype: Any) -> Any:
    """Return the value of each key's table: one value if it is the same for all."""
    numbers = np.array(values, dtype)
    if local is None or (numbers == numbers[0]).all():
        return numbers[0]
    return tf.gather(tf.constant(numbers), local)


def some(values: tf.Tensor | None, indices: tf.Tensor) -> tf.Tensor | None:
    """Return some of the values, if there are any."""
    return None if values is None else tf.gather(values, indices)


def table_in(tags: tf.Tensor) -> tf.Tensor:
    """Return the number of the table in each tag."""
    return tf.bitwise.right_shift(tags, np.int32(SLOT_BITS))
