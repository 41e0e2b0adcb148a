"""The rules by which ids of a `DynamicEmbedding` get rows and lose them, for users."""

from __future__ import annotations

from kerasps.dynamic.ids.admission import CountAdmission, ProbabilityAdmission
from kerasps.dynamic.ids.eviction import Eviction
from kerasps.dynamic.tables.evicted import EvictedIds

__all__ = ["CountAdmission", "EvictedIds", "Eviction", "ProbabilityAdmission"]
