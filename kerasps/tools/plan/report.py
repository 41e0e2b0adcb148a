"""The results of `kerasps plan`: records whose fields are the keys of its JSON.

Rows, and bytes that are pulled or pushed, are means of a step over the sample. None means that a
number is not known.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ShardPlan:
    """A shard of a variable; a whole variable has one."""

    ps: int
    num_bytes: int
    rows_per_step: float | None


@dataclass(frozen=True)
class VariablePlan:
    """A variable of the model."""

    path: str
    # With 0 rows if it is a table without a vocabulary.
    shape: tuple[int, ...]
    dtype: str
    # Without those of slots.
    num_bytes: int
    slot_bytes: int
    read: Literal["whole", "rows", "never"]
    # With repetitions.
    ids_per_step: float | None
    rows_per_step: float | None
    shards: tuple[ShardPlan, ...]


@dataclass(frozen=True)
class PSPlan:
    """The variables of one ps, and the bytes that each step moves there."""

    index: int
    num_variables: int
    variable_bytes: int
    slot_bytes: int
    # Both of these, as in `strategy.placement()`.
    num_bytes: int
    # Copies of small variables, which exist while steps run.
    fused_bytes: int
    memory_bytes: int
    rows_per_step: float | None
    pulled_bytes: float | None
    pushed_bytes: float | None
    id_bytes: float | None
    messages: int

    @property
    def link_bytes(self) -> float | None:
        """The bytes of a step in the direction that has more; None if that is not known.

        A link carries both directions at once: values go out of a ps, gradients and ids come in.
        """
        if self.pulled_bytes is None or self.pushed_bytes is None or self.id_bytes is None:
            return None
        return max(self.pulled_bytes, self.pushed_bytes + self.id_bytes)


@dataclass(frozen=True)
class StepCosts:
    """The traffic of a step of one worker, to and from all ps."""

    pulled_bytes: float | None
    pushed_bytes: float | None
    id_bytes: float | None
    # The parts for variables that are read whole.
    dense_pulled_bytes: int
    dense_pushed_bytes: int
    rows_per_step: float | None
    messages: int
    # Round trips of its pull: more than one if ids depend on rows.
    rounds: int
    batches_per_step: int
    steps_per_execution: int
    # Of one pass over the data.
    num_batches: int | None
    data_read_by: Literal["workers", "coordinator"]


@dataclass(frozen=True)
class SamplePlan:
    """The batches in which rows were counted."""

    num_batches: int
    batch_bytes: float | None
    unknown: str | None


@dataclass(frozen=True)
class WorkerMemory:
    """The memory that a worker needs beside TensorFlow's, and without the activations of layers."""

    weight_bytes: int
    gradient_bytes: int
    row_bytes: float | None
    batch_bytes: float | None
    num_bytes: float


@dataclass(frozen=True)
class Advice:
    """A change of the script or of the cluster that would help."""

    change: str
    text: str


@dataclass(frozen=True)
class Plan:
    """The plan of a training."""

    script: str
    method: str
    model: str
    optimizer: str | None
    num_workers: int
    num_ps: int
    ps: tuple[PSPlan, ...]
    variables: tuple[VariablePlan, ...]
    step: StepCosts
    sample: SamplePlan
    worker_memory: WorkerMemory
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes on all ps."""
        return sum(ps.num_bytes for ps in self.ps)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON. Docs/plan.md lists the keys."""
        return {"version": 1, **dataclasses.asdict(self)}
