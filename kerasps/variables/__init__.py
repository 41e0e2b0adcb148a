"""Variables on ps tasks: makes them, splits them into shards, reads, writes, moves, destroys them.

Contract: outside a step, a `ParameterServerVariable` is an ordinary `keras.Variable` whose storage
is remote. Inside a step it resolves through the `Phase` of the current thread; who traces steps
supplies the phase, and this wing knows none of them.
"""

from __future__ import annotations

from kerasps.variables.kinds import is_seed_state
from kerasps.variables.lookup_tables import LookupTables
from kerasps.variables.named import NamedVariable, anonymous_handle, call_with
from kerasps.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from kerasps.variables.phase import come_to_rest, current_phase, entering
from kerasps.variables.shards import Shard, shards_in
from kerasps.variables.slots import slots_of
from kerasps.variables.variable import ParameterServerVariable

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
    "come_to_rest",
    "current_phase",
    "entering",
    "is_seed_state",
    "shards_in",
    "slots_of",
]
