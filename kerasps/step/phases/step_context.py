"""The interface of pull, compute and push, and the tensors that they pass to each other.

Each phase is made once, when the step is traced: it traces its functions for other tasks and plans
its messages. While a step graph is built, the phase adds its operations, once for each unrolled
step. It reads from the `StepContext` the results of the phases before, and writes its own there.
Phases share nothing else, so each can be read and changed alone.
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
        """The handles that these functions captured; a step graph looks them up by name."""

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
    """The inputs of one replica of a step, in a step graph."""

    def __init__(
        self,
        scratch: Mapping[ScratchKey, tf.Tensor],
        names: InputNames,
        batch: object,
        start: ByIdentity[ParameterServerVariable, tf.Tensor],
    ) -> None:
        self.scratch = scratch
        self.batch = batch
        # The initial value of each variable. The pull adds those of dense variables.
        self.values: ByIdentity[ParameterServerVariable, tf.Tensor] = ByIdentity()
        # The rows of each table. Set by the pull.
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
        """Add the rows of a table."""
        self.tables[table] = rows
        self.known.update(zip(self._names.tables[table], leaves_of(rows), strict=True))


class StepContext:
    """The tensors of one step in a step graph.

    Args:
        handles: the step graph's replacements of captured handles (see `variables.call_with`).
        lanes: the lane in which the step pushes to each ps, by the device of the ps.
        asked: the requests that were sent ahead of the step, by the round (see
            `PullPhase.ask_ahead`).
        device: the short name of the worker's device that converts large values and gradients
            between the dtypes in which they are sent and computed.

    Attributes:
        pull_handles: the handles for the pull: the same as `handles`, unless steps overlap.
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
        # Operations that the pull from each ps waits for, by the device of the ps.
        self.before_pull: Mapping[str, list[tf.Operation]] = {}
        # The operations of the push, by the device of the ps. Set by the push.
        self.pushes: dict[str, list[tf.Operation]] = {}
        self.lanes = lanes
        self.number = number
        self.replicas = replicas
        self.asked = asked or {}
        self.device = f"/device:{device}"
        # The rows that the step asks for, by the table. Set by the pull.
        self.requests: ByIdentity[ParameterServerVariable, RowRequest] = ByIdentity()
        # The packed request of each `DevicePull` to its ps. Set by the pull.
        self.messages: dict[Any, list[tf.Tensor]] = {}
        # What its ps knows of these rows in the push, which sends gradients for the same rows (see
        # `DevicePull.known_specs`). Set by the pull.
        self.known_rows: dict[Any, list[tf.Tensor]] = {}
        # The clock of each ps when the step began to pull from it, by the device of the ps. Set by
        # the pull.
        self.clocks: dict[str, tf.Tensor] = {}
        # The results of the compute phase. Set by it.
        self.outputs: ComputeOutputs

    @property
    def values(self) -> ByIdentity[ParameterServerVariable, tf.Tensor]:
        """The initial values of the first replica; pulled ones are the same for all replicas."""
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
        """Add the rows of a table in this step.

        Args:
            positions: for each look-up, the place of each id among `rows`; all look-ups of the
                first replica come before those of the second.
            found: likewise, the row of each id.
        """
        num_lookups = len(positions) // len(self.replicas)
        for index, replica in enumerate(self.replicas):
            span = slice(index * num_lookups, (index + 1) * num_lookups)
            replica.add_table(table, TableRows(rows, list(positions[span]), list(found[span])))
