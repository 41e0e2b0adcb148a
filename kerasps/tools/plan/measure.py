"""Computes a `Plan` from the first step of a script: the variables of each ps, and the traffic."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from kerasps.dynamic import KeyedRows
from kerasps.dynamic.tables.table import KeyedVariable
from kerasps.runtime.devices import ps_index
from kerasps.step import TRAIN
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.tracing.plan import StepPlan
from kerasps.tools.plan.host import FirstStep
from kerasps.tools.plan.report import (
    Plan,
    PSPlan,
    SamplePlan,
    ShardPlan,
    StepCosts,
    VariablePlan,
    WorkerMemory,
)
from kerasps.tools.plan.sample import Sample, take_sample
from kerasps.variables import ParameterServerVariable, shards_in, slots_of
from kerasps.variables.keras.slots import optimizers_of
from kerasps.variables.placing.placement import TaskPlacement
from kerasps.variables.rows.pooled_rows import PooledRows

# The bytes of an id in a message, and of the count of a table's ids.
_ID_BYTES = 4


def plan_of(first: FirstStep, script: str, sample_batches: int) -> Plan:
    """Return the plan of a script that is about to run its first step."""
    gc.collect()  # otherwise garbage of the trace counts as held
    plan = first.function.plans.trace.plan
    sample = take_sample(first.data, plan, sample_batches)
    measured = _Measured(first, plan, sample)
    optimizer = getattr(first.model, "optimizer", None)
    is_on_batch = isinstance(first.data, Sequence)
    name = "fit" if first.mode is TRAIN else first.mode.name.replace("test", "evaluate")
    return Plan(
        script=script,
        method=f"{first.mode.name}_on_batch" if is_on_batch else name,
        model=first.model.name,
        optimizer=None if optimizer is None else type(optimizer).__name__,
        num_workers=first.host.num_workers,
        num_ps=first.host.num_ps,
        ps=tuple(measured.ps(ps) for ps in first.host.extended.ledger.placement()),
        variables=measured.variables(),
        step=measured.step(),
        sample=SamplePlan(sample.num_batches, sample.mean(sample.num_bytes), sample.unknown),
        worker_memory=measured.worker_memory(),
        notes=measured.notes(),
    )


class _Measured:
    """Measures a step."""

    def __init__(self, first: FirstStep, plan: StepPlan, sample: Sample) -> None:
        self._first = first
        self._plan = plan
        self._sample = sample
        optimizers = IdentitySet([*optimizers_of(first.model), *plan.inventory.optimizers])
        self._slots: ByIdentity[ParameterServerVariable, list[ParameterServerVariable]] = (
            ByIdentity()
        )
        state: list[Any] = []
        for optimizer in optimizers:
            state += optimizer.variables
            if optimizer.built:
                trained = optimizer._trainable_variables
                for variable, slots in zip(trained, slots_of(optimizer), strict=True):
                    self._slots[variable] = [*self._slots.get(variable, []), *_on_ps(slots)]
        self._state = IdentitySet(_on_ps(state))

    def ps(self, held: TaskPlacement) -> PSPlan:
        """Return the plan of a ps, given its placement."""
        index = ps_index(held.device)
        plan, traffic = self._plan, self._plan.traffic
        slot_bytes = _bytes_on(index, self._state)
        fused = [variable for variable in plan.fused.all if ps_index(variable.device) == index]
        fused_bytes = sum(
            _bytes(v) for variable in fused for v in (variable.values, *variable.slots)
        )
        tables = [
            (table, rows)
            for table, rows in zip(traffic.tables, self._sample.rows, strict=True)
            if table.ps == index
        ]
        pulls = [pull for pull in plan.pull.pulls if ps_index(pull.device) == index]
        pushes = [push for push in plan.push.pushes if ps_index(push.device) == index]
        mean = self._sample.mean
        counts = sum(len(pull.runs) for pull in pulls if len(pull.runs) > 1)
        # A key is as long as two ids.
        keyed = sum(rows for table, rows in tables if not isinstance(table.num_rows, int))
        rows = mean(sum(rows for _, rows in tables)) if tables else 0.0
        pulled = mean(sum(rows * t.row_bytes for t, rows in tables)) if tables else 0.0
        written = [(t, rows) for t, rows in tables if t.is_written]
        pushed = mean(sum(rows * t.row_bytes for t, rows in written)) if written else 0.0
        return PSPlan(
            index=index,
            num_variables=held.num_variables,
            variable_bytes=held.num_bytes - slot_bytes,
            slot_bytes=slot_bytes,
            num_bytes=held.num_bytes,
            fused_bytes=fused_bytes,
            memory_bytes=held.num_bytes + fused_bytes,
            rows_per_step=rows,
            pulled_bytes=_sum(traffic.dense_read.get(index, 0), pulled),
            pushed_bytes=_sum(traffic.dense_written.get(index, 0), pushed),
            id_bytes=None if rows is None else _ID_BYTES * (rows + keyed + counts),
            # For each pull a reply, and a request if it asks for rows; and the pushes.
            messages=sum(1 + bool(pull.runs) for pull in pulls) + len(pushes),
        )

    def step(self) -> StepCosts:
        """Return the traffic of a step."""
        first, traffic = self._first, self._plan.traffic
        ps = [self.ps(task) for task in first.host.extended.ledger.placement()]
        sends = getattr(first.data, "sends_batches", True)
        return StepCosts(
            pulled_bytes=_sum(*(task.pulled_bytes for task in ps)),
            pushed_bytes=_sum(*(task.pushed_bytes for task in ps)),
            id_bytes=_sum(*(task.id_bytes for task in ps)),
            dense_pulled_bytes=sum(traffic.dense_read.values()),
            dense_pushed_bytes=sum(traffic.dense_written.values()),
            rows_per_step=_sum(*(task.rows_per_step for task in ps)),
            messages=sum(task.messages for task in ps),
            rounds=len(self._plan.pull.rounds),
            batches_per_step=first.function.plans.batches_per_step,
            steps_per_execution=int(first.model.steps_per_execution),
            num_batches=getattr(first.data, "num_batches", None),
            data_read_by="coordinator" if sends else "workers",
        )

    def variables(self) -> tuple[VariablePlan, ...]:
        """Return the plans of the variables on ps tasks, except the states of optimizers."""
        inventory = self._plan.inventory
        known = IdentitySet([*inventory.pulled, *inventory.tables, *self._first.model.variables])
        plans = [self._variable(v) for v in _on_ps(known) if v not in self._state]
        return tuple(sorted(plans, key=lambda v: -(v.num_bytes + v.slot_bytes)))

    def _variable(self, variable: ParameterServerVariable) -> VariablePlan:
        rows: dict[int, float] = {}
        ids = math.nan
        for number, shard in enumerate(self._plan.table_shards):
            if shard.variable is variable:
                rows[shard.index] = self._sample.rows[number]
                ids = self._sample.ids[number]
        mean = self._sample.mean
        return VariablePlan(
            path=variable.path,
            shape=_shape(variable),
            dtype=str(variable.dtype),
            num_bytes=sum(_bytes(shard) for shard in variable.shards),
            slot_bytes=sum(
                _bytes(s) for slot in self._slots.get(variable, []) for s in slot.shards
            ),
            read=self._read(variable),
            ids_per_step=mean(ids),
            rows_per_step=mean(sum(rows.values())) if rows else None,
            shards=tuple(
                ShardPlan(ps_index(shard.device), _bytes(shard), mean(rows.get(index, math.nan)))
                for index, shard in enumerate(variable.shards)
            ),
        )

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each table without a vocabulary, whose bytes are not counted."""
        return tuple(
            f"'{variable.path}' has no vocabulary, and is not counted: each row takes "
            f"{variable.row_bytes} bytes with its slots, and up to 64 beside."
            for variable in _on_ps(self._plan.inventory.tables)
            if isinstance(variable, KeyedVariable) and variable not in self._state
        )

    def _read(self, variable: ParameterServerVariable) -> Literal["whole", "rows", "never"]:
        if variable in self._plan.inventory.tables:
            return "rows"
        return "whole" if variable in self._plan.inventory.pulled else "never"

    def worker_memory(self) -> WorkerMemory:
        """Return the memory that a worker needs."""
        plan, sample = self._plan, self._sample
        weights = sum(_bytes(shard) for v in plan.inventory.pulled for shard in v.shards)
        gradients = sum(
            _bytes(shard.storage)
            for update in plan.compute.updates
            for shard in shards_in(update.variables)
            if shard.variable not in plan.inventory.tables
        )
        tables = [*zip(plan.table_shards, plan.traffic.tables, sample.rows, strict=True)]
        row_bytes = [
            rows * math.prod(shard.spec.shape[1:]) * shard.spec.dtype.size * (1 + table.is_written)
            for shard, table, rows in tables
        ]
        rows = sample.mean(float(np.sum(row_bytes))) if tables else 0.0
        batch = sample.mean(sample.num_bytes)
        known = weights + gradients + (rows or 0.0) + (batch or 0.0)
        return WorkerMemory(weights, gradients, rows, batch, known)


def _on_ps(variables: Iterable[object]) -> list[ParameterServerVariable]:
    return [
        v for v in variables if isinstance(v, ParameterServerVariable) and "/job:ps" in v.device
    ]


def _shape(variable: ParameterServerVariable) -> tuple[int, ...]:
    """Return the shape of a variable; a table without a vocabulary has no rows yet."""
    sizes = tuple(int(size) for size in variable.shape)
    return sizes if variable.has_whole_value else (0, *sizes[1:])


def _bytes(storage: tf.Variable | PooledRows | KeyedRows) -> int:
    """Return the bytes of a `tf.Variable`, or of another storage of a shard."""
    if isinstance(storage, KeyedRows):
        return 0  # nobody knows how many rows it will have
    return int(math.prod(storage.shape) * storage.dtype.size)


def _bytes_on(ps: int, variables: Iterable[ParameterServerVariable]) -> int:
    return sum(
        _bytes(shard)
        for variable in variables
        for shard in variable.shards
        if ps_index(str(shard.device)) == ps
    )


def _sum(*parts: float | None) -> float | None:
    """Return a sum; None if a part is not known."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
