"""The shape that pull, compute and push share, and the tensors that they hand each other.

Each phase is made once, when the step is traced: it has traced what runs on other tasks, and knows
what travels. While a step graph is built, it adds its operations to that, once for each step laid
out in it: it takes from the `StepContext` what the phases before have left there, and leaves what
it has found. Nothing else passes between phases, so each can be read, and changed, by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from kerasps.cluster.description.worker_devices import FIRST_CPU
from kerasps.step.contract.compute_messages import ComputeOutputs, InputNames, TableRows
from kerasps.step.contract.inventory import ScratchKey
from kerasps.step.records.identity import ByIdentity
from kerasps.step.records.packing import leaves_of
from kerasps.step.rows.row_requests import RowRequest
from kerasps.variables import ParameterServerVariable


class StepPhase(Protocol):
    """One phase of a step: pull, compute or push."""

    @property
    def functions(self) -> list[Any]:
        """The concrete functions that a step calls."""

    @property
    def captures(self) -> list[tf.Tensor]:
        """The handles that these captured; a step graph looks them up by name."""

    def add_to(self, step: StepContext) -> None:
        """Add the operations of one step to the step graph that is being built."""


def batch_inputs(names: Sequence[InputNames], batches: Sequence[object]) -> dict[str, tf.Tensor]:
    """Return the tensors of replicas' batches, by the names of the compute phase's inputs."""
    return {
        name: tensor
        for replica, batch in zip(names, batches, strict=True)
        for name, tensor in zip(replica.batch, leaves_of(batch), strict=True)
    }


class ReplicaInputs:
    """The inputs of one replica of a step, in a step graph.

    Args:
        scratch: the handles of the scratch resources.
        names: the names of the inputs of the compute phase.
        batch: the batch.
        start: the values of metrics and seed generators that it starts from.

    Attributes:
        values: the value of each variable that it starts from. The pull adds those of dense
            variables.
        tables: what each table is. From the pull.
    """

    def __init__(
        self,
        scratch: Mapping[ScratchKey, tf.Tensor],
        names: InputNames,
        batch: object,
        start: ByIdentity[ParameterServerVariable, tf.Tensor],
    ) -> None:
        self.scratch = scratch
        self.batch = batch
        self.values: ByIdentity[ParameterServerVariable, tf.Tensor] = ByIdentity()
        self.tables: ByIdentity[ParameterServerVariable, TableRows] = ByIdentity()
        self.known = batch_inputs([names], [batch])
        self._names = names
        self.add_values(start.items())

    def add_values(self, values: Iterable[tuple[ParameterServerVariable, tf.Tensor]]) -> None:
        """Add the values of variables."""
        for variable, value in values:
            self.values[variable] = value
            self.known[self._names.values[variable]] = value

    def add_table(self, table: ParameterServerVariable, rows: TableRows) -> None:
        """Add what a table is."""
        self.tables[table] = rows
        self.known.update(zip(self._names.tables[table], leaves_of(rows), strict=True))


class StepContext:
    """The tensors of one step in a step graph.

    Args:
        handles: what stands for captured handles in the step graph (see `variables.call_with`).
        replicas: what each replica starts from.
        lanes: the lane in which each ps is sent the step's push, by the device of the ps.
        number: the number of the call that the step is of, where pushes carry one.
        asked: what was asked for ahead of the step, by the round (see `PullPhase.ask_ahead`).
        device: the short name of the device of the worker that converts large values and gradients
            between the dtypes in which they travel and are computed.

    Attributes:
        pull_handles: the handles for the pull; those of the other phases, unless steps overlap.
        before_pull: operations that the pull from each ps waits for, by the device of the ps.
        pushes: the operations that have pushed, likewise. From the push.
        requests: the rows that the step asks for, by the table. From the pull.
        messages: what each `DevicePull` has asked its ps for, packed: the push sends gradients for
            the same rows. From the pull.
        clocks: what the clock of each ps was when the step began to pull from it, by the device of
            the ps. From the pull.
        outputs: what the step has worked out. From the compute phase.
    """

    def __init__(
        self,
        handles: dict[int, tf.Tensor],
        replicas: Sequence[ReplicaInputs],
        lanes: Mapping[str, tf.Tensor],
        number: tf.Tensor | None = None,
        asked: Mapping[Any, Any] | None = None,
        device: str = FIRST_CPU,
    ) -> None:
        self.handles = self.pull_handles = handles
        self.before_pull: Mapping[str, list[tf.Operation]] = {}
        self.pushes: dict[str, list[tf.Operation]] = {}
        self.lanes = lanes
        self.number = number
        self.replicas = replicas
        self.asked = asked or {}
        self.device = f"/device:{device}"
        self.requests: ByIdentity[ParameterServerVariable, RowRequest] = ByIdentity()
        self.messages: dict[Any, list[tf.Tensor]] = {}
        self.clocks: dict[str, tf.Tensor] = {}
        self.outputs: ComputeOutputs

    @property
    def values(self) -> ByIdentity[ParameterServerVariable, tf.Tensor]:
        """The values of variables that the first replica starts from; pulled ones are of all."""
        return self.replicas[0].values

    @property
    def known(self) -> dict[str, tf.Tensor]:
        """The tensors known so far, by the names of the compute phase's inputs."""
        return {name: tensor for replica in self.replicas for name, tensor in replica.known.items()}

    def add_values(self, values: Iterable[tuple[ParameterServerVariable, tf.Tensor]]) -> None:
        """Add the values of variables, for all replicas."""
        values = list(values)
        for replica in self.replicas:
            replica.add_values(values)

    def add_table(
        self,
        table: ParameterServerVariable,
        rows: tf.Tensor,
        positions: Sequence[tf.Tensor],
        found: Sequence[tf.Tensor],
    ) -> None:
        """Add what a table is in this step.

        Args:
            table: the table.
            rows: the rows that were asked for.
            positions: of each look-up, those of the first replica before those of the second, the
                place of each id among `rows`.
            found: likewise, the row of each id.
        """
        num_lookups = len(positions) // len(self.replicas)
        for index, replica in enumerate(self.replicas):
            span = slice(index * num_lookups, (index + 1) * num_lookups)
            replica.add_table(table, TableRows(rows, list(positions[span]), list(found[span])))
