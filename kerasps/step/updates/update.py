"""One `optimizer.apply` of a step, as the compute phase records it and the push carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kerasps.step.records.identity import ByIdentity
from kerasps.step.updates.coupled import CoupledUpdate, Sent
from kerasps.step.updates.updating import Scalars
from kerasps.variables import ParameterServerVariable


class UpdateTensors(NamedTuple):
    """The tensors of one `optimizer.apply`; lists are in the order of the update's variables.

    Attributes:
        scalars: the learning rate and shared state.
        gradients: a gradient per variable; of a table, one row for each row asked for.
        sent: of each variable, what its shards need of the whole of it; mostly nothing.
        applied: whether the optimizer was applied, where that depends; else None.
        addends: of each variable, what its gradient is the sum of, where nothing else has become of
            it (see `found_rows.py`): for each look-up, a tensor with a row for each id. Mostly
            nothing.
    """

    scalars: Scalars
    gradients: list[Any]
    sent: list[Sent]
    applied: Any = None
    addends: Sequence[list[Any]] = ()


@dataclass(frozen=True)
class Update:
    """One `optimizer.apply`: what the push needs to carry it out on the ps tasks.

    Attributes:
        optimizer: the `keras.optimizers.Optimizer`.
        variables: the variables that it updates.
        shared: the variables of its shared state.
        coupled: the updates of those variables that may couple rows.
        tensors: what the step has worked out for it.
        lookups: of each variable whose gradient's addends are known, the numbers of the look-ups
            that they are of, in their order.
    """

    optimizer: Any
    variables: list[ParameterServerVariable]
    shared: list[ParameterServerVariable]
    coupled: ByIdentity[ParameterServerVariable, CoupledUpdate]
    tensors: UpdateTensors
    lookups: ByIdentity[ParameterServerVariable, list[int]] = field(default_factory=ByIdentity)
