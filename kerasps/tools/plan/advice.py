"""Gives advice on a training: sentences, each with the number that it follows from."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from kerasps.tools.monitoring.advice import (
    EXECUTION_S,
    STEPS_PER_EXECUTION,
    are_too_short,
    worth_below,
)
from kerasps.tools.plan.report import Advice, Plan, PSPlan
from kerasps.words import num_bytes

# The speed of a link of 10 Gbit/s, which hosts of clusters have at least.
LINK_BYTES_PER_S = 1.25e9
# A worker's step that waits this long for one ps is slow, whatever it computes meanwhile.
SLOW_S = 0.1
# Fewer bytes are not worth a change.
NOTABLE_BYTES = 16 << 20
# The load is uneven if the heaviest ps holds more than this many times the mean.
UNEVEN = 1.5
# The share of a machine's memory that values may take.
MEMORY_SHARE = 0.8


def advice_for(
    plan: Plan, *, is_split: bool, is_16_bits: bool, overlaps: bool, memory: int | None = None
) -> tuple[Advice, ...]:
    """Return advice on the training."""
    memory = memory_of_machine() if memory is None else memory
    found = [*_memory(plan, memory, is_split=is_split)]
    if not found or is_split:  # else the advice names the partitioner already
        found += _uneven(plan, is_split=is_split)
    if not found:  # splitting variables would give each ps some
        found += _idle(plan)
    found += [*_link(plan), *_whole_tables(plan)]
    if not is_16_bits:
        found += _wire_dtype(plan)
    if not overlaps:
        found += _steps_per_execution(plan)
    return (*found, *_feeding(plan))


def memory_of_machine() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _heaviest(plan: Plan) -> PSPlan:
    return max(plan.ps, key=lambda ps: ps.memory_bytes)


def _memory(plan: Plan, memory: int, *, is_split: bool) -> Iterator[Advice]:
    room = int(MEMORY_SHARE * memory)
    heaviest, total = _heaviest(plan), sum(ps.memory_bytes for ps in plan.ps)
    needed = math.ceil(total / room)
    if heaviest.memory_bytes <= room or needed <= plan.num_ps:
        return
    partitioner = "" if is_split else " and `variable_partitioner=kerasps.MinSizePartitioner()`"
    yield Advice(
        "more_ps",
        f"Take {needed} ps{partitioner}, or machines with more memory: ps {heaviest.index} needs "
        f"{num_bytes(heaviest.memory_bytes)} for its values, and this machine has "
        f"{num_bytes(memory)}.",
    )


def _uneven(plan: Plan, *, is_split: bool) -> Iterator[Advice]:
    heaviest, total = _heaviest(plan), sum(ps.memory_bytes for ps in plan.ps)
    if plan.num_ps == 1 or heaviest.memory_bytes < NOTABLE_BYTES:
        return
    if heaviest.memory_bytes <= UNEVEN * total / plan.num_ps:
        return
    whole = [
        variable
        for variable in plan.variables
        if len(variable.shards) == 1
        and variable.shards[0].ps == heaviest.index
        and variable.shape[:1] > (1,)
    ]
    if not whole:
        return
    largest = whole[0]
    how = (
        "Lower `min_shard_bytes`, or raise `max_shards`, of the partitioner"
        if is_split
        else "Pass `variable_partitioner=kerasps.MinSizePartitioner()` to the strategy"
    )
    yield Advice(
        "partitioner",
        f"{how}: ps {heaviest.index} holds {heaviest.memory_bytes / total:.0%} of all bytes, since "
        f"'{largest.path}', with its slots {num_bytes(largest.num_bytes + largest.slot_bytes)}, "
        "is whole.",
    )


def _idle(plan: Plan) -> Iterator[Advice]:
    used = sum(1 for ps in plan.ps if ps.num_bytes)
    if used < plan.num_ps:
        yield Advice(
            "fewer_ps",
            f"Take {max(1, used)} ps: {plan.num_ps - used} of {plan.num_ps} hold no variable.",
        )


def _link(plan: Plan) -> Iterator[Advice]:
    known = [(ps.link_bytes, ps.index) for ps in plan.ps if ps.link_bytes is not None]
    if not known:
        return
    most, index = max(known)
    seconds = most * plan.num_workers / LINK_BYTES_PER_S
    if seconds < SLOW_S:
        return
    workers = f"{plan.num_workers} worker{'s' if plan.num_workers > 1 else ''}"
    yield Advice(
        "more_ps",
        f"Take more ps, with a network interface each: a step moves {num_bytes(most)} to or from "
        f"ps {index}, which takes {seconds:.2f} s at 10 Gbit/s for a step of each of {workers}.",
    )


def _whole_tables(plan: Plan) -> Iterator[Advice]:
    for variable in plan.variables:
        is_table = variable.path.endswith("/embeddings") and variable.num_bytes > NOTABLE_BYTES
        if is_table and variable.read == "whole":
            yield Advice(
                "lookup",
                f"Use '{variable.path}' only for lookups by ids of the batch: each step reads all "
                f"of its {num_bytes(variable.num_bytes)}.",
            )


def _wire_dtype(plan: Plan) -> Iterator[Advice]:
    step = plan.step
    moved = step.dense_pulled_bytes + step.dense_pushed_bytes
    if step.pulled_bytes is not None and step.pushed_bytes is not None:
        moved = int(step.pulled_bytes + step.pushed_bytes)
    dtypes = {variable.dtype for variable in plan.variables if variable.read != "never"}
    if moved >= NOTABLE_BYTES and dtypes == {"float32"}:
        yield Advice(
            "wire_dtype",
            f'Pass `wire_dtype="bfloat16"` to the strategy, if the network is the limit: a step '
            f"moves {num_bytes(moved)}, and would move about half.",
        )


def _steps_per_execution(plan: Plan) -> Iterator[Advice]:
    step = plan.step
    parts = (step.pulled_bytes, step.pushed_bytes)
    if step.steps_per_execution != 1 or plan.num_workers == 1 or plan.method != "fit":
        return
    if None in parts:
        return
    seconds = sum(part for part in parts if part is not None) / LINK_BYTES_PER_S
    steps = STEPS_PER_EXECUTION
    if step.num_batches is not None:
        # At least two executions for each worker, or some are idle at the end.
        steps = min(steps, step.num_batches // (2 * plan.num_workers))
    waiting = EXECUTION_S / (EXECUTION_S + seconds)
    if steps > 1 and are_too_short(step.steps_per_execution, waiting):
        yield Advice(
            "steps_per_execution",
            f"Pass `steps_per_execution={steps}` to `compile`, if updates may be {steps} steps "
            f"older, and a step takes less than {worth_below(EXECUTION_S) * 1e3:g} ms: an "
            f"execution costs some {EXECUTION_S * 1e3:g} ms beside its steps. The traffic of a "
            f"step takes {seconds * 1e3:.2g} ms at 10 Gbit/s.",
        )


def _feeding(plan: Plan) -> Iterator[Advice]:
    if plan.step.data_read_by == "coordinator" and plan.num_workers > 1 and plan.method == "fit":
        size = plan.sample.batch_bytes
        of_size = "" if size is None else f" of {num_bytes(size)}"
        yield Advice(
            "dataset_creator",
            f"Read the data in a `kerasps.DatasetCreator`: the coordinator reads each "
            f"batch{of_size} and sends it to one of {plan.num_workers} workers.",
        )
