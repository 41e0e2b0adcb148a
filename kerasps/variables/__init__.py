"""Variables on ps tasks: makes them, splits them into shards, reads, writes, moves, destroys them.

Contract: outside a step, a `ParameterServerVariable` is an ordinary `keras.Variable` whose storage
is remote. Inside a step it resolves through the `Phase` of the current thread; who traces steps
supplies the phase, and this wing knows none of them.
"""

from __future__ import annotations

from kerasps.variables.adoption import (
    adopt_model,
    adopt_optimizer,
    adopt_variable,
    keras_variable_of,
    strategy_of,
    unsharded,
)
from kerasps.variables.away import AwayStates, drawn
from kerasps.variables.chunks import (
    CHUNK_BYTES,
    StoredRows,
    chunks_of,
    num_bytes,
    read_rows,
    row_bytes,
    write_rows,
)
from kerasps.variables.fences import OPEN_LANE, Fences
from kerasps.variables.flights import Flight, aboard, wait_for_flights, worker_timeout
from kerasps.variables.joint_table import (
    JOINT_TABLE_SIZE,
    Member,
    read_joint,
    release,
    wait_for,
)
from kerasps.variables.kinds import is_metric_state, is_recurrent_state, is_seed_state
from kerasps.variables.lane_table import (
    NO_LANE,
    NUM_BINS,
    LaneRecord,
    apply_if_in_lane,
    apply_in_lane,
    is_open,
    read_clock,
)
from kerasps.variables.lookup_tables import LookupTables
from kerasps.variables.named import (
    Lookup,
    NamedVariable,
    anonymous_handle,
    call_with,
    plain_variable,
)
from kerasps.variables.names import CALLS, NAMES
from kerasps.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from kerasps.variables.phase import (
    OutsideReplicaError,
    as_replica,
    before_access,
    check_replica,
    come_to_rest,
    creating_under,
    current_phase,
    entering,
    is_outside_replica,
    lying_elsewhere,
    num_assignments,
    outside_replica,
)
from kerasps.variables.placement import (
    LookedUp,
    Placement,
    PlacementLedger,
    TaskPlacement,
    text_table,
)
from kerasps.variables.placing import Extended, is_ours
from kerasps.variables.pooled_rows import PooledRows, assign_rows, held_by
from kerasps.variables.row_pools import RowPools
from kerasps.variables.sharding import (
    ShardedStorage,
    Sharding,
    WholeValue,
    from_start,
)
from kerasps.variables.shards import Shard, shards_in
from kerasps.variables.slots import (
    check_optimizer,
    move_slots,
    optimizers_of,
    shared_state,
    slots_of,
)
from kerasps.variables.tensor_like import TensorLike, note_read
from kerasps.variables.variable import ParameterServerVariable, make_parameter_server_variable

__all__ = [
    "CALLS",
    "CHUNK_BYTES",
    "JOINT_TABLE_SIZE",
    "NAMES",
    "NO_LANE",
    "NUM_BINS",
    "OPEN_LANE",
    "AwayStates",
    "Extended",
    "Fences",
    "FixedShardsPartitioner",
    "Flight",
    "LaneRecord",
    "LookedUp",
    "Lookup",
    "LookupTables",
    "MaxSizePartitioner",
    "Member",
    "MinSizePartitioner",
    "NamedVariable",
    "OutsideReplicaError",
    "ParameterServerVariable",
    "Placement",
    "PlacementLedger",
    "PooledRows",
    "RowPools",
    "Shard",
    "ShardedStorage",
    "Sharding",
    "StoredRows",
    "TaskPlacement",
    "TensorLike",
    "WholeValue",
    "aboard",
    "adopt_model",
    "adopt_optimizer",
    "adopt_variable",
    "anonymous_handle",
    "apply_if_in_lane",
    "apply_in_lane",
    "as_replica",
    "assign_rows",
    "before_access",
    "call_with",
    "check_optimizer",
    "check_replica",
    "chunks_of",
    "come_to_rest",
    "creating_under",
    "current_phase",
    "drawn",
    "entering",
    "from_start",
    "held_by",
    "is_metric_state",
    "is_open",
    "is_ours",
    "is_outside_replica",
    "is_recurrent_state",
    "is_seed_state",
    "keras_variable_of",
    "lying_elsewhere",
    "make_parameter_server_variable",
    "move_slots",
    "note_read",
    "num_assignments",
    "num_bytes",
    "optimizers_of",
    "outside_replica",
    "plain_variable",
    "read_clock",
    "read_joint",
    "read_rows",
    "release",
    "row_bytes",
    "shards_in",
    "shared_state",
    "slots_of",
    "strategy_of",
    "text_table",
    "unsharded",
    "wait_for",
    "wait_for_flights",
    "worker_timeout",
    "write_rows",
]
