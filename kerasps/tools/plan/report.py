"""The results of `kerasps plan`: records whose fields are the keys of its JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class ShardPlan:
    """A shard of a variable; a whole variable has one.

    Attributes:
        ps: the index of the ps that holds it.
        num_bytes: its bytes, without slots.
        rows_per_step: the number of its rows that a step reads, on average over the sample; None if
            steps read it whole, or if the number is not known.
    """

    ps: int
    num_bytes: int
    rows_per_step: float | None


@dataclass(frozen=True)
class VariablePlan:
    """A variable of the model.

    Attributes:
        path: its path in the model.
        shape: its shape.
        dtype: the name of its dtype.
        num_bytes: its bytes.
        slot_bytes: the bytes of its slots, which are beside it.
        read: the way that a step reads it: "whole", by "rows", or "never".
        ids_per_step: the number of ids that a step looks up in it, with repetitions; None as for
            rows.
        rows_per_step: the number of different rows that a step reads; None as for a shard's rows.
        shards: its shards.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    slot_bytes: int
    read: Literal["whole", "rows", "never"]
    ids_per_step: float | None
    rows_per_step: float | None
    shards: tuple[ShardPlan, ...]


@dataclass(frozen=True)
class PSPlan:
    """The variables of one ps, and the bytes that each step moves there.

    Attributes:
        index: the index of the ps.
        num_variables: the number of variables and slots that it holds; a shard counts as one.
        variable_bytes: the bytes of variables, without slots.
        slot_bytes: the bytes of slots and other state of optimizers.
        num_bytes: the bytes of all these, as in `strategy.placement()`.
        fused_bytes: the bytes of copies of small variables, which exist while steps run.
        memory_bytes: the memory that values take: `num_bytes` and `fused_bytes`.
        rows_per_step: the rows of tables that a step reads; None if that is not known.
        pulled_bytes: the bytes of values that a step pulls from it; None as for rows.
        pushed_bytes: the bytes of gradients and new values that a step sends it; None as for rows.
        id_bytes: the bytes of the ids of rows that a step reads; None as for rows.
        messages: the number of messages that a step and this ps send each other.
    """

    index: int
    num_variables: int
    variable_bytes: int
    slot_bytes: int
    num_bytes: int
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
    """The traffic of a step of one worker, to and from all ps.

    Attributes:
        pulled_bytes: the bytes of values that it pulls; None if rows are not known.
        pushed_bytes: the bytes of gradients and new values that it sends; None likewise.
        id_bytes: the bytes of the ids of rows that it reads; None likewise.
        dense_pulled_bytes: the part of `pulled_bytes` for variables that are read whole.
        dense_pushed_bytes: the part of `pushed_bytes` for variables that are read whole.
        rows_per_step: the rows of tables that it reads; None likewise.
        messages: the number of messages that it and the ps send each other.
        rounds: the round trips of its pull: more than one if ids depend on rows.
        batches_per_step: the batches that a step takes: one for each device of a worker.
        steps_per_execution: the compiled model's value.
        num_batches: the batches of one pass over the data, in all; None if that is not known.
        data_read_by: "workers", or "coordinator" if it reads batches and sends them to workers.
    """

    pulled_bytes: float | None
    pushed_bytes: float | None
    id_bytes: float | None
    dense_pulled_bytes: int
    dense_pushed_bytes: int
    rows_per_step: float | None
    messages: int
    rounds: int
    batches_per_step: int
    steps_per_execution: int
    num_batches: int | None
    data_read_by: Literal["workers", "coordinator"]


@dataclass(frozen=True)
class SamplePlan:
    """The batches in which rows were counted.

    Attributes:
        num_batches: the number of batches.
        batch_bytes: the bytes of a batch, on average; None without a batch.
        unknown: the reason why some number is not known; None if all are known.
    """

    num_batches: int
    batch_bytes: float | None
    unknown: str | None


@dataclass(frozen=True)
class WorkerMemory:
    """The memory that a worker needs beside TensorFlow's, and without the activations of layers.

    Attributes:
        weight_bytes: the bytes of values that are read whole.
        gradient_bytes: the bytes of their gradients.
        row_bytes: the bytes of tables' rows and their gradients; None if rows are not known.
        batch_bytes: the bytes of the batch; None if they are not known.
        num_bytes: the sum of those that are known.
    """

    weight_bytes: int
    gradient_bytes: int
    row_bytes: float | None
    batch_bytes: float | None
    num_bytes: float


@dataclass(frozen=True)
class Advice:
    """A change of the script or of the cluster that would help.

    Attributes:
        change: what to change, in a word: "more_ps", "fewer_ps", "partitioner", "wire_dtype",
            "steps_per_execution", "dataset_creator" or "lookup".
        text: a sentence with the number that it follows from.
    """

    change: str
    text: str


@dataclass(frozen=True)
class Plan:
    """The plan of a training.

    Attributes:
        script: the script's path.
        method: the first method that runs steps: "fit", "evaluate", "predict" or one on one batch.
        model: the name of the model.
        optimizer: the class of its optimizer; None without one.
        num_workers: the number of workers of its cluster.
        num_ps: the number of ps of its cluster.
        ps: the plan of each ps.
        variables: the variables on ps tasks, the largest first.
        step: the traffic of a step.
        sample: the batches in which rows were counted.
        worker_memory: the memory that a worker needs.
        advice: changes that would help.
        notes: further remarks.
    """

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
