"""Reads some batches of the data, and counts the rows of tables that each would read."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.errors import InputError
from kerasps.inputs import Input
from kerasps.runtime.errors import translated_errors
from kerasps.step.phases.step_context import batch_inputs
from kerasps.step.records.packing import leaves_of
from kerasps.step.rows.row_requests import Asked
from kerasps.step.tracing.plan import StepPlan

# A person waits. A pipeline that fills a large buffer first, or reads remote files, takes longer.
LIMIT_S = 30.0


@dataclass
class Sample:
    """The rows that some batches look up.

    Attributes:
        rows: for each shard of `StepPlan.table_shards`, the rows that all batches read; NaN if that
            depends on more than the batch.
        ids: for each shard, the ids that the batches look up in its whole table.
    """

    num_batches: int = 0
    num_bytes: int = 0
    rows: np.ndarray = field(default_factory=lambda: np.zeros([0]))
    ids: np.ndarray = field(default_factory=lambda: np.zeros([0]))
    unknown: str | None = None

    def mean(self, total: float) -> float | None:
        """Return a total per batch; None if it is not known."""
        return float(total) / self.num_batches if self.num_batches and total == total else None


def take_sample(
    data: Input | Sequence[object], plan: StepPlan, limit: int, seconds: float = LIMIT_S
) -> Sample:
    """Read batches, and count the rows that each reads.

    Args:
        data: the data of the script, or batches. It is also read if it can be read only once.
        seconds: the time limit. The batches that were read until then count.
    """
    number = len(plan.table_shards)
    sample = Sample(rows=np.zeros([number]), ids=np.zeros([number]))
    if not limit:
        sample.unknown = "No batch was read (--sample-batches 0)."
        return sample
    reader = _Reader(lambda: _batches(data), limit)
    for batch in reader.until(time.monotonic() + seconds):
        try:
            with translated_errors(None):
                rows, ids = _asked_for(plan, batch)
        except (InputError, tf.errors.OpError) as exc:
            sample.unknown = f"A step with batch {sample.num_batches} would fail: {exc}"
            break
        sample.num_batches += 1
        sample.num_bytes += sum(_bytes_of(tensor) for tensor in leaves_of(batch))
        sample.rows += rows
        sample.ids += ids
    if sample.unknown is None:
        sample.unknown = _why_unknown(sample, reader, seconds)
    return sample


def _why_unknown(sample: Sample, reader: _Reader, seconds: float) -> str | None:
    if not sample.num_batches:
        if reader.error is not None:
            return f"No batch could be read: {reader.error}"
        return "There is no batch." if reader.is_over else f"No batch came within {seconds:g} s."
    if np.isnan(sample.rows).any():
        return "Some ids follow from rows of other tables, or from variables, not from a batch."
    return None


class _Reader:
    """Reads batches in a thread, which may never return.

    Attributes:
        is_over: whether `limit` batches, or all batches, were read.
    """

    def __init__(self, batches: Callable[[], Iterator[object]], limit: int) -> None:
        self._batches = batches
        self._limit = limit
        self._read: list[Any] = []
        self._changed = threading.Condition()
        self.error: Exception | None = None
        self.is_over = False

    def until(self, deadline: float) -> Iterator[Any]:
        """Yield batches as they arrive, until a deadline on `time.monotonic`'s clock."""
        threading.Thread(target=self._run, name="kerasps-sample", daemon=True).start()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._read or self.is_over, deadline - time.monotonic()
                )
                if not self._read:
                    return
                batch = self._read.pop(0)
            yield batch
            if time.monotonic() > deadline:
                return

    def _run(self) -> None:
        try:
            for _, batch in zip(range(self._limit), self._batches(), strict=False):
                with self._changed:
                    self._read.append(batch)
                    self._changed.notify_all()
        except Exception as exc:  # the user's pipeline may raise any
            self.error = exc
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


def _batches(data: Input | Sequence[object]) -> Iterator[Any]:
    """Yield the batches that the first worker would read, then those of the second, and so on."""
    if isinstance(data, Sequence):
        yield from data
        return
    data.start_pass(0, must_end=False)
    if not data.sends_batches:
        for split in range(data.num_splits):
            yield from data.open(split, 0).iterator or ()
        return
    while batches := data.next_batches(1).batches:
        yield from batches


def _asked_for(plan: StepPlan, batch: object) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each shard of a table, the rows that a batch reads, and its table's ids."""
    known = batch_inputs(plan.names[:1], [batch])
    rows: list[float] = []
    ids: list[float] = []
    for pull in plan.pull.rounds:
        groups = pull.round.groups
        if not pull.can_ask(known):
            number = sum(len(group.tables) * group.num_shards for group in groups)
            rows += [math.nan] * number
            ids += [math.nan] * number
            continue
        found = pull.round.find(*[known[name] for name in pull.round.inputs]) if groups else []
        for group, fields in zip(groups, found, strict=True):
            asked = Asked(*fields)
            of_tables = [sum(int(tf.size(p)) for p in positions) for positions in asked.positions]
            for shard in group.shards:
                rows += [float(count) for count in asked.counts[shard.index].numpy()]
                ids += [float(number) for number in of_tables]
    return np.array(rows), np.array(ids)


def _bytes_of(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * int(tensor.dtype.size)
