"""One `optimizer.apply` of a step, as the compute phase records it and the push carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.updates.updating import Scalars
from kerasps.variables import ParameterServerVariable


class UpdateTensors(NamedTuple):
    """The tensors of one `optimizer.apply`; lists are in the order of the update's variables."""

    scalars: Scalars  # the learning rate and shared state
    gradients: list[Any]  # a gradient per variable; for a table, one row for each row asked for
    applied: Any = None  # whether the optimizer was applied, if that is conditional; else None
    # For each variable, the addends of its gradient, if the step used the gradient only for the
    # optimizer (see `found_rows.py`): for each look-up, a tensor with a row for each id. Mostly
    # nothing.
    addends: Sequence[list[Any]] = ()


@dataclass(frozen=True)
class Update:
    """One `optimizer.apply`: all that the push needs to carry it out on the ps tasks."""

    optimizer: Any
    variables: list[ParameterServerVariable]  # the variables that it updates
    shared: list[ParameterServerVariable]  # the variables of its shared state
    # The tables of which it updates all rows, since it couples them.
    coupled: IdentitySet[ParameterServerVariable]
    tensors: UpdateTensors  # the tensors that the step computed for it
    # For each variable whose gradient's addends are known, the indices of their look-ups, in their
    # order.
    lookups: ByIdentity[ParameterServerVariable, list[int]] = field(default_factory=ByIdentity)
