"""All that a step graph needs to know about the traced step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from kerasps.cluster.description.worker_devices import FIRST_CPU
from kerasps.dynamic import growing_rows
from kerasps.runtime.devices import ps_index
from kerasps.step.contract.compute_messages import InputNames
from kerasps.step.contract.inventory import Inventory
from kerasps.step.phases.compute_phase import ComputePhase
from kerasps.step.phases.pull import PullPhase
from kerasps.step.phases.push import PushPhase
from kerasps.step.phases.seed_draw import SeedDraw
from kerasps.step.phases.step_context import StepPhase
from kerasps.step.records.packing import Packing, wire_dtype_of
from kerasps.step.records.specs import sent_rows, spec_of
from kerasps.step.tracing.state import StepState
from kerasps.step.tracing.traffic import StepTraffic, TableTraffic
from kerasps.step.updates.fused import FusedVariables
from kerasps.variables import LookupTables, ParameterServerVariable, Shard
from kerasps.variables.keras.joins import Join
from kerasps.variables.storage.named import HandleFinder

# A `tf.while_loop` across devices costs about 1 ms an iteration, which the steps of a block share,
# and once what another block would send. Building the graph costs a worker some 0.1 ms an
# operation. A model with many operations is so slow that the loop does not matter: fewer of its
# steps are unrolled.
MAX_UNROLLED_STEPS = 10
MAX_UNROLLED_OPERATIONS = 20000
MAX_UNROLLED_COMPUTE_OPERATIONS = 8000
# Steps overlap only within a block. Between blocks, a step waits for the network some ten times, so
# longer blocks are worth the time that building them takes.
MAX_OVERLAPPING_STEPS = 40
MAX_OVERLAPPING_OPERATIONS = 12000


@dataclass(frozen=True)
class ExecutionLimits:
    """The limits on the number of steps in an execution."""

    # The most steps; None for no limit. Steps that predict are not looped, and outputs that cannot
    # be put end to end return step by step.
    steps: int | None
    fed_steps: int  # the most steps if the batches are sent to the worker
    unrolled: int  # the most steps that are laid out one after the other
    overlapping: int  # the number of steps that overlap with each other; 1 if none do


@dataclass(frozen=True)
class StepPlan:
    """The phases of a step, and the records that its step graphs need."""

    pull: PullPhase  # the first phase
    compute: ComputePhase  # the second
    push: PushPhase  # the third
    names: list[InputNames]  # the names of the inputs of the compute phase's graph, by replica
    fused: FusedVariables  # the fused variables
    # Finds by name, in a step graph, the variables that the phases have captured.
    find_handles: HandleFinder
    lookup_tables: LookupTables  # the lookup tables that the compute phase has captured
    joins: list[Join]  # the ways in which the states of metrics are joined, in their order
    draws: list[int]  # the number of seeds that a step takes from each generator
    # Draws the seeds on a ps, if their states are there (see `variables.StandIns`).
    draw: SeedDraw | None
    log_names: list[str]  # the names of the logs that the step returned beside the metrics
    outputs: list[tf.TensorSpec]  # the specs of the tensors that it predicted
    joins_outputs: bool  # whether the outputs of several steps can be put end to end
    overlaps: bool  # whether a step pulls while the push of the step before is in flight
    # The plan of one replica, for left-over batches, if the step has several; else None.
    single: StepPlan | None = None

    @property
    def num_replicas(self) -> int:
        """The number of replicas of a step; each takes a batch."""
        return len(self.names)

    @property
    def converts_on(self) -> str:
        """The short name of the device that converts values sent in another dtype.

        A worker's only GPU does so: half the bytes go to it, and come from it.
        """
        return self.compute.device if self.num_replicas == 1 else FIRST_CPU

    @property
    def phases(self) -> list[StepPhase]:
        """The phases, in the order in which they run."""
        return [self.pull, self.compute, self.push]

    @cached_property
    def redoing(self) -> StepPlan:
        """The plan of steps that some ps may have applied before."""
        single = None if self.single is None else self.single.redoing
        return replace(self, push=self.push.redoing(), single=single)

    @property
    def inventory(self) -> Inventory:
        """The variables that the step touches."""
        return self.compute.inventory

    @cached_property
    def metrics(self) -> list[ParameterServerVariable]:
        """The metric states, in the order of the state."""
        return list(self.inventory.metrics)

    @cached_property
    def seeds(self) -> list[ParameterServerVariable]:
        """The states of the seed generators that a step draws from, in the order of the header."""
        return list(self.inventory.seeds)

    @cached_property
    def table_shards(self) -> list[Shard]:
        """The shards of tables, in the order in which the state counts their rows."""
        return [
            shard
            for group in self.pull.groups
            for group_shard in group.shards
            for shard in group_shard.shards
        ]

    @cached_property
    def state(self) -> Packing[StepState]:
        """The packing of the state for transfer."""
        rows = tf.TensorSpec([len(self.table_shards)], tf.int64)
        return Packing(
            StepState(
                steps=tf.TensorSpec([], tf.int64),
                metrics=[spec_of(v) for v in self.metrics],
                rows=[rows] if self.table_shards else [],
                logs=[tf.TensorSpec([], tf.float32) for _ in self.log_names],
            )
        )

    @cached_property
    def traffic(self) -> StepTraffic:
        """The traffic of each step, per ps; its tables are in the order of `table_shards`."""
        read: dict[int, int] = {}
        for pull in self.pull.pulls:
            ps = ps_index(pull.device)
            read[ps] = read.get(ps, 0) + pull.received.num_bytes
        written = {ps_index(push.device): push.packing.num_bytes for push in self.push.pushes}
        runs = [run for push in self.push.pushes for of_group in push.tables for run in of_group]
        updated = {shard for run in runs for shard in run.shards}
        tables = [
            TableTraffic(
                ps_index(shard.device),
                shard.variable.path,
                math.prod(shard.spec.shape[1:]) * wire_dtype_of(sent_rows(shard.variable)).size,
                shard in updated,
                math.prod(shard.spec.shape[1:]) * shard.spec.dtype.size,
                growing_rows(shard.storage) or int(shard.spec.shape[0]),
            )
            for shard in self.table_shards
        ]
        return StepTraffic(read, written, tables)

    @cached_property
    def limits(self) -> ExecutionLimits:
        """The limits on the number of steps in an execution."""
        unrolled = self.max_unrolled_steps
        most = (unrolled if self.joins_outputs else 1) if self.outputs else None
        overlapping = unrolled if self.overlaps else 1
        return ExecutionLimits(most, most or unrolled, unrolled, overlapping)

    @cached_property
    def max_unrolled_steps(self) -> int:
        """The most steps that a graph may have one after the other."""
        if self.push.rule.max_unrolled_steps is not None:
            return self.push.rule.max_unrolled_steps
        operations = _num_operations(*self.phases)
        if self.overlaps:
            return max(1, min(MAX_OVERLAPPING_STEPS, MAX_OVERLAPPING_OPERATIONS // operations))
        of_compute = MAX_UNROLLED_COMPUTE_OPERATIONS // _num_operations(self.compute)
        return max(1, min(MAX_UNROLLED_STEPS, MAX_UNROLLED_OPERATIONS // operations, of_compute))


def _num_operations(*phases: StepPhase) -> int:
    """Return the number of operations of `phases`, at least 1 so that it can be a divisor."""
    functions: list[Any] = [f for phase in phases for f in phase.functions]
    return max(1, sum(len(function.graph.get_operations()) for function in functions))
