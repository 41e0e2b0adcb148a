"""The rules by which ids of a `DynamicEmbedding` get rows and lose them, for users."""

from __future__ import annotations

from kerasps.dynamic.ids.admission import CountAdmission, ProbabilityAdmission
from kerasps.dynamic.ids.eviction import Eviction

__all__ = ["CountAdmission", "Eviction", "ProbabilityAdmission"]
