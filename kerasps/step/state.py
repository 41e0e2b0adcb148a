"""What an execution is given and what it returns: its header, and the state that its steps add to.

The state goes from step to step. It starts at zero and is returned; or it is added to what the
worker holds from the executions before (`WorkerTotals`), which spares the coordinator a fetch per
execution.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kerasps.step.packing import Packing
from kerasps.variables import NAMES, OPEN_LANE


class Header(NamedTuple):
    """What the coordinator sends with an execution: which steps of the training these are.

    Attributes:
        first_step: the global number of the first step.
        seeds: for each generator that a step draws from, its seed and its counter at that step.
    """

    first_step: Any
    seeds: Sequence[Sequence[Any]]

    @staticmethod
    def spec() -> tf.TensorSpec:
        """Return the spec of a header as it travels: one element, for which no call waits."""
        return tf.TensorSpec([], tf.string)

    def to_bytes(self) -> bytes:
        """Return the header as the coordinator sends it: int64 numbers."""
        numbers = [self.first_step, *(n for seed in self.seeds for n in seed)]
        return np.array(numbers, "<i8").tobytes()

    @classmethod
    def from_tensor(cls, tensor: tf.Tensor, num_seeds: int) -> Header:
        """Return the header that `to_bytes` made, as scalars in the graph of an execution."""
        packed = tf.io.decode_raw(tensor, tf.int64)
        first_step, *numbers = tf.unstack(packed, 1 + 2 * num_seeds)
        pairs = iter(numbers)
        return cls(first_step, list(zip(pairs, pairs, strict=True)))


class StepState(NamedTuple):
    """What goes from step to step; holds tensors, arrays or their specs.

    Attributes:
        steps: how many steps were done.
        metrics: the states of metrics that these steps alone add up to.
        rows: how many rows of each shard of a table were asked for, in one tensor; empty for a
            model without tables.
        logs: what the last step returned beside the metrics.
    """

    steps: Any
    metrics: list[Any]
    rows: list[Any]
    logs: list[Any]

    def zeros(self) -> StepState:
        """Return the state before any step; this is one of specs."""
        zeros: StepState = tf.nest.map_structure(
            lambda spec: tf.zeros(spec.shape, spec.dtype), self
        )
        return zeros

    def followed_by(self, later: StepState) -> StepState:
        """Return the state after the steps of both: sums, and the last logs."""
        sums: StepState = tf.nest.map_structure(
            operator.add, self._replace(logs=[]), later._replace(logs=[])
        )
        return sums._replace(logs=later.logs)


class Ticket(NamedTuple):
    """What a worker needs to know to have its pushes applied; holds numbers, or tensors of them.

    Attributes:
        lane: the lane in which it pushes (see `variables.Fences`).
        applied: for each ps that is pushed to, how many of the first steps of the executions that
            it runs now were applied there before, by a worker that was lost.
    """

    lane: Any
    applied: Sequence[Any]

    @classmethod
    def from_tensor(cls, tensor: tf.Tensor) -> Ticket:
        """Return the ticket that `to_array` made, as scalars in the graph of an execution."""
        lane, *applied = tf.unstack(tensor)
        return cls(lane, applied)

    def to_array(self) -> np.ndarray:
        """Return the ticket as the coordinator sends it: one int32 array."""
        return np.array([self.lane, *self.applied], np.int32)


class WorkerTicket:
    """The ticket that each worker has.

    Args:
        num_ps: how many ps are pushed to.

    Attributes:
        spec: of a ticket as it travels.
    """

    def __init__(self, num_ps: int) -> None:
        self.spec = tf.TensorSpec([1 + num_ps], tf.int32)
        # The name is the same on each worker, so one graph serves all.
        kind = ("ticket", num_ps)
        self._name = NAMES.claim(kind)
        weakref.finalize(self, NAMES.give_back, kind, self._name).atexit = False
        self.give = tf.function(
            self._give, autograph=False, input_signature=[self.spec]
        ).get_concrete_function()

    def read(self) -> tf.Tensor:
        """Read the ticket, packed, in the graph of an execution."""
        packed = tf.raw_ops.ReadVariableOp(resource=self._handle(), dtype=tf.int32)
        packed.set_shape(self.spec.shape)
        return packed

    def of_coordinator(self) -> tf.Tensor:
        """Return the ticket of steps that the coordinator does itself, packed."""
        num_ps = self.spec.shape[0] - 1
        return tf.constant(Ticket(OPEN_LANE, [0] * num_ps).to_array())

    def _give(self, packed: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._handle(), value=packed)

    def _handle(self) -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(
            dtype=tf.int32, shape=self.spec.shape, container="", shared_name=self._name
        )


class WorkerTotals:
    """An accumulator on each worker: the state of all steps since it was last collected.

    Args:
        packing: how the state is laid into flat tensors.
    """

    def __init__(self, packing: Packing[StepState]) -> None:
        self._packing = packing
        # The name is the same on each worker, so one graph serves all.
        kinds = [("totals", spec.dtype.name, tuple(spec.shape)) for spec in packing.carrier_specs]
        self._names = [NAMES.claim(kind) for kind in kinds]
        for kind, name in zip(kinds, self._names, strict=True):
            # Whoever gets it next clears what is there.
            weakref.finalize(self, NAMES.give_back, kind, name).atexit = False
        self.clear = tf.function(self._clear, autograph=False).get_concrete_function()
        self.collect = tf.function(self._collect, autograph=False).get_concrete_function()

    def read(self) -> StepState:
        """Read the state, in the graph of an execution."""
        flats = []
        for handle, spec in self._handles():
            flat = tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype)
            flat.set_shape(spec.shape)
            flats.append(flat)
        return self._packing.unpack(flats)

    def write(self, state: StepState) -> None:
        """Overwrite the state, in the graph of an execution."""
        for (handle, _), flat in zip(self._handles(), self._packing.pack(state), strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=flat)

    def _handles(self) -> list[tuple[tf.Tensor, tf.TensorSpec]]:
        return [
            (
                tf.raw_ops.VarHandleOp(
                    dtype=spec.dtype, shape=spec.shape, container="", shared_name=name
                ),
                spec,
            )
            for name, spec in zip(self._names, self._packing.carrier_specs, strict=True)
        ]

    def _clear(self) -> None:
        self.write(self._packing.specs.zeros())

    def _collect(self) -> list[tf.Tensor]:
        flats = self._packing.pack(self.read())
        # Cleared once read, never before: without the edge, TensorFlow may do it in any order.
        with tf.control_dependencies(flats):
            self._clear()
        return flats
