"""Keras layers of kerasps: an embedding that needs no vocabulary, and rows to load into tables.

Contract: in the scope of a strategy of kerasps, the rows of a layer are on the ps. Without a
strategy, a layer works in one process. Functions take layers of both kinds.
"""

from __future__ import annotations

from kerasps.layers.dynamic_embedding import DynamicEmbedding
from kerasps.layers.loading import load_rows
from kerasps.layers.rules import (
    ChangedRows,
    CountAdmission,
    EvictedIds,
    Eviction,
    ProbabilityAdmission,
)
from kerasps.layers.table_sources import rows_in_file, rows_of_recommenders_addons

__all__ = [
    "ChangedRows",
    "CountAdmission",
    "DynamicEmbedding",
    "EvictedIds",
    "Eviction",
    "ProbabilityAdmission",
    "load_rows",
    "rows_in_file",
    "rows_of_recommenders_addons",
]

# Users import them from here.
for _public in (
    ChangedRows,
    CountAdmission,
    DynamicEmbedding,
    EvictedIds,
    Eviction,
    ProbabilityAdmission,
    load_rows,
    rows_in_file,
    rows_of_recommenders_addons,
):
    _public.__module__ = __name__
