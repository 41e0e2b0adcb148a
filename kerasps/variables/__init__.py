"""Makes variables on ps tasks, splits them into shards, reads, writes, moves and destroys them.

Contract: outside a step, a `ParameterServerVariable` is an ordinary `keras.Variable` whose storage
is remote. Inside a step it resolves through the `Phase` of the current thread. The code that traces
steps supplies the phase; this wing knows no class of phases.
"""

from __future__ import annotations

from kerasps.variables.keras.shards import Shard, shards_in
from kerasps.variables.keras.slots import slots_of
from kerasps.variables.keras.variable import ParameterServerVariable
from kerasps.variables.lanes.phase import current_phase, entering, wait_for_steps
from kerasps.variables.placing.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from kerasps.variables.storage.kinds import is_seed_state
from kerasps.variables.storage.lookup_tables import LookupTables
from kerasps.variables.storage.named import NamedVariable, anonymous_handle, call_with

__all__ = [
    "FixedShardsPartitioner",
    "LookupTables",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "NamedVariable",
    "ParameterServerVariable",
    "Shard",
    "anonymous_handle",
    "call_with",
    "current_phase",
    "entering",
    "is_seed_state",
    "shards_in",
    "slots_of",
    "wait_for_steps",
]
