"""Tables without a vocabulary: rows that belong to ids, made when they are first updated.

Contract: turns ids into keys, and keys into places of rows on a ps or in this process. It knows no
steps: a step calls `KeyedRows.look_up` in its pull, and `KeyedRows.made` in its push.
"""

from __future__ import annotations

from kerasps.dynamic.ids.keys import part_of
from kerasps.dynamic.parts.keyed_rows import KeyedRows, keys_of_tables
from kerasps.dynamic.parts.terms import MEETING, AskedKeys
from kerasps.dynamic.tables.key_pools import add_key_pools
from kerasps.dynamic.tables.row_counts import GrowingRows, count_again, count_rows, growing_rows

__all__ = [
    "MEETING",
    "AskedKeys",
    "GrowingRows",
    "KeyedRows",
    "add_key_pools",
    "count_again",
    "count_rows",
    "growing_rows",
    "keys_of_tables",
    "part_of",
]
