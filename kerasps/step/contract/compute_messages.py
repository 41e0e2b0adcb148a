"""The inputs and outputs of the compute phase, as records with named fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from kerasps.step.contract.change import Change
from kerasps.step.contract.inventory import Inventory
from kerasps.step.records.identity import ByIdentity
from kerasps.step.records.packing import leaves_of
from kerasps.step.records.specs import rows_spec, spec_of
from kerasps.step.updates.update import UpdateTensors
from kerasps.variables import ParameterServerVariable


class TableRows(NamedTuple):
    """A table in one step: the rows that the step asks for, each once."""

    rows: Any  # of shape `[num_rows_asked_for] + table.shape[1:]`
    positions: list[Any]  # for each look-up, the place of each id among `rows`: a flat int32 tensor
    found: list[Any]  # for each look-up, the row of each id, of shape `[num_ids] + table.shape[1:]`


class ComputeInputs(NamedTuple):
    """The arguments of the compute phase's graph; lists are in the order of the `Inventory`.

    Holds tensors or their specs.
    """

    batch: Any  # the batch, as `train_step` takes it
    pulled: list[Any]  # the values of variables that are read whole
    metrics: list[Any]  # the states of metrics
    seeds: list[Any]  # the states of seed generators
    tables: list[TableRows]  # the rows of each table
    scratch: list[Any]  # the handles of the scratch resources

    @classmethod
    def specs(cls, element_spec: object, inventory: Inventory) -> ComputeInputs:
        """Return the specs of the arguments, for batches of `element_spec`."""
        position = tf.TensorSpec([None], tf.int32)
        return cls(
            batch=element_spec,
            pulled=[spec_of(v) for v in inventory.pulled],
            metrics=[spec_of(v) for v in inventory.metrics],
            seeds=[spec_of(v) for v in inventory.seeds],
            tables=[
                TableRows(
                    rows_spec(table), [position] * num_lookups, [rows_spec(table)] * num_lookups
                )
                for table, num_lookups in inventory.tables.items()
            ],
            scratch=[tf.TensorSpec([], tf.resource) for _ in inventory.scratch],
        )

    @classmethod
    def by_replica(cls, arguments: Sequence[Any], num_replicas: int) -> list[ComputeInputs]:
        """Return the inputs of each replica; `arguments` has those of the first, then the next."""
        size = len(arguments) // num_replicas
        firsts = range(0, len(arguments), size)
        return [cls(*arguments[first : first + size]) for first in firsts]

    def values(self, inventory: Inventory) -> ByIdentity[ParameterServerVariable, Any]:
        """Return the initial values of the step, by their variables."""
        return ByIdentity(
            [
                *zip(inventory.pulled, self.pulled, strict=True),
                *zip(inventory.metrics, self.metrics, strict=True),
                *zip(inventory.seeds, self.seeds, strict=True),
            ]
        )

    def tables_of(self, inventory: Inventory) -> ByIdentity[ParameterServerVariable, TableRows]:
        """Return the rows of each table, by the table."""
        return ByIdentity(zip(inventory.tables, self.tables, strict=True))


@dataclass(frozen=True)
class InputNames:
    """The names of the inputs of the compute phase's graph."""

    batch: list[str]  # the names of the tensors of the batch
    values: ByIdentity[ParameterServerVariable, str]  # the name of each variable's value
    # The names of each table's tensors, in the order of `TableRows`.
    tables: ByIdentity[ParameterServerVariable, list[str]]

    @classmethod
    def of(cls, inputs: ComputeInputs, inventory: Inventory) -> InputNames:
        """Return the names of the tensors that the graph was traced with."""
        return cls(
            [tensor.op.name for tensor in leaves_of(inputs.batch)],
            ByIdentity((v, t.op.name) for v, t in inputs.values(inventory).items()),
            ByIdentity(
                (table, [tensor.op.name for tensor in leaves_of(rows)])
                for table, rows in inputs.tables_of(inventory).items()
            ),
        )


class ComputeOutputs(NamedTuple):
    """The outputs of the compute phase's graph."""

    metrics: list[Any]  # the new states of metrics
    updates: list[UpdateTensors]  # the tensors of each update, in the order of the updates
    changes: list[Change]  # the changes of the step to other variables: the fields that are sent
    logs: list[Any]  # the values that the step returned beside the metrics
    predicted: list[Any]  # the tensors that it predicted
