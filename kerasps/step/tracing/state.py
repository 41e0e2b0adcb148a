"""The inputs and outputs of an execution: its header, and the state that its steps add to.

The state passes from step to step. It starts as that of no step. An execution returns it, or adds
it to the totals of the worker (`WorkerVariables`), which saves the coordinator a fetch per
execution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kerasps.step.records.packing import Packing
from kerasps.variables import anonymous_handle
from kerasps.variables.keras.joins import Join
from kerasps.variables.lanes.fences import OPEN_LANE

# Keras's seeds are positive, and less than this.
_MAX_SEED = 2**31 - 1


class Header(NamedTuple):
    """The header that the coordinator sends with an execution: its place in the training."""

    first_step: Any  # the global number of the first step
    # The seed of each generator that a step draws from, and its counter at that step.
    seeds: Sequence[Sequence[Any]]
    draws: Sequence[int] = ()  # the number of seeds that a step takes from each

    @staticmethod
    def spec() -> tf.TensorSpec:
        """Return the spec of a header as it is sent: one element, for which no call waits."""
        return tf.TensorSpec([], tf.string)

    def to_bytes(self) -> bytes:
        """Return the header as the coordinator sends it: int64 numbers."""
        numbers = [self.first_step, *(n for seed in self.seeds for n in seed)]
        return np.array(numbers, "<i8").tobytes()

    def after(self, num_steps: int) -> Header:
        """Return the header for the steps that follow `num_steps` steps."""
        seeds = [
            (seed, counter + num_steps * draws)
            for (seed, counter), draws in zip(self.seeds, self.draws, strict=True)
        ]
        return self._replace(first_step=self.first_step + num_steps, seeds=seeds)

    def with_other_seeds(self, offset: int) -> Header:
        """Return the header with `offset` added to each seed."""
        seeds = [((seed + offset) % _MAX_SEED, counter) for seed, counter in self.seeds]
        return self._replace(seeds=seeds)

    @classmethod
    def from_tensor(cls, tensor: tf.Tensor, num_seeds: int) -> Header:
        """Return the header that `to_bytes` packed, as scalars in the graph of an execution."""
        packed = tf.io.decode_raw(tensor, tf.int64)
        first_step, *numbers = tf.unstack(packed, 1 + 2 * num_seeds)
        pairs = iter(numbers)
        return cls(first_step, list(zip(pairs, pairs, strict=True)))


class StepState(NamedTuple):
    """The state that passes from step to step; holds tensors, arrays or their specs."""

    steps: Any  # the number of steps that are done
    metrics: list[Any]  # the states of metrics over these steps alone
    # The number of rows that the steps asked for from each shard of a table, in one tensor; empty
    # for a model without tables.
    rows: list[Any]
    logs: list[Any]  # the logs of the last step, except the metrics

    def start(self, joins: Sequence[Join]) -> StepState:
        """Return the state before the first step; call it on a state of specs."""
        zeros: StepState = tf.nest.map_structure(
            lambda spec: tf.zeros(spec.shape, spec.dtype), self
        )
        metrics = [join.start(spec) for join, spec in zip(joins, self.metrics, strict=True)]
        return zeros._replace(metrics=metrics)

    def followed_by(self, later: StepState, joins: Sequence[Join]) -> StepState:
        """Return the state after the steps of both: sums, metrics by `joins`, and the last logs."""
        return StepState(
            steps=self.steps + later.steps,
            metrics=[
                join.tensors(before, after)
                for join, before, after in zip(joins, self.metrics, later.metrics, strict=True)
            ],
            rows=[before + after for before, after in zip(self.rows, later.rows, strict=True)],
            logs=later.logs,
        )


class Ticket(NamedTuple):
    """The ticket with which a ps applies a worker's pushes; holds numbers, or tensors of them."""

    lane: Any  # the lane in which it pushes (see `variables.Fences`)
    # For each ps that the step pushes to, how many of the first steps of the current executions it
    # has applied before, for a worker that was lost.
    applied: Sequence[Any]

    @classmethod
    def from_tensor(cls, tensor: tf.Tensor) -> Ticket:
        """Return the ticket that `to_array` packed, as scalars in the graph of an execution."""
        lane, *applied = tf.unstack(tensor)
        return cls(lane, applied)

    def to_array(self) -> np.ndarray:
        """Return the ticket as the coordinator sends it: one int32 array."""
        return np.array([self.lane, *self.applied], np.int32)


class WorkerVariables:
    """The variables that a worker keeps from execution to execution, once it is made ready.

    They are its ticket and its totals: the state of all steps since the last `collect`. They are
    resources without names; the coordinator has their handles. A worker that is made ready again
    gets new ones. So executions that were sent before, and may still run, reach neither.
    """

    def __init__(self, packing: Packing[StepState], num_ps: int, joins: Sequence[Join]) -> None:
        self._joins = joins
        self._packing = packing
        self._num_ps = num_ps
        # Of a ticket as it is sent.
        self.ticket_spec = tf.TensorSpec([1 + num_ps], tf.int32)
        self._specs = [self.ticket_spec, *packing.carrier_specs]
        self.handle_specs = [tf.TensorSpec([], tf.resource) for _ in self._specs]
        self.make = _concrete(self._make, self.ticket_spec)
        self.give = _concrete(self._give, self.handle_specs, self.ticket_spec)
        self.collect = _concrete(self._collect, self.handle_specs)

    def ticket(self, handles: Sequence[tf.Tensor]) -> tf.Tensor:
        """Read the ticket, packed, in the graph of an execution."""
        return self._read(handles)[0]

    def ticket_of_coordinator(self) -> tf.Tensor:
        """Return the packed ticket for steps that run on the coordinator."""
        return tf.constant(Ticket(OPEN_LANE, [0] * self._num_ps).to_array())

    def add(self, handles: Sequence[tf.Tensor], state: StepState) -> None:
        """Add to the totals, in the graph of an execution."""
        totals = self._packing.unpack(self._read(handles)[1:])
        self._write(handles, [None, *self._packing.pack(totals.followed_by(state, self._joins))])

    def _make(self, ticket: tf.Tensor) -> list[tf.Tensor]:
        with tf.device("CPU:0"):
            handles = [anonymous_handle(spec.shape, spec.dtype) for spec in self._specs]
        self._write(handles, [ticket, *self._start()])
        return handles

    def _give(self, handles: Sequence[tf.Tensor], ticket: tf.Tensor) -> None:
        self._write(handles[:1], [ticket])

    def _collect(self, handles: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        flats = self._read(handles)[1:]
        # Cleared after the read: without the edge, TensorFlow may do both in any order.
        with tf.control_dependencies(flats):
            self._write(handles, [None, *self._start()])
        return flats

    def _start(self) -> list[tf.Tensor]:
        """Return the packed totals of no steps."""
        return self._packing.pack(self._packing.specs.start(self._joins))

    def _read(self, handles: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        values = []
        for handle, spec in zip(handles, self._specs, strict=True):
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype)
            value.set_shape(spec.shape)
            values.append(value)
        return values

    @staticmethod
    def _write(handles: Sequence[tf.Tensor], values: Sequence[tf.Tensor | None]) -> None:
        for handle, value in zip(handles, values, strict=True):
            if value is not None:
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _concrete(function: Callable[..., object], *specs: object) -> Any:
    return tf.function(function, autograph=False).get_concrete_function(*specs)
