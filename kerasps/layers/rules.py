"""The rules by which ids of a `DynamicEmbedding` get rows and lose them, and its answers."""

from __future__ import annotations

from kerasps.dynamic.ids.admission import CountAdmission, ProbabilityAdmission
from kerasps.dynamic.ids.eviction import Eviction
from kerasps.dynamic.tables.changed import ChangedRows
from kerasps.dynamic.tables.evicted import EvictedIds

__all__ = ["ChangedRows", "CountAdmission", "EvictedIds", "Eviction", "ProbabilityAdmission"]
