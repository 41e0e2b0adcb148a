"""Eviction in one process: the use of rows, in a weight of the layer, and the rows to replace."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from kerasps.dynamic.ids.eviction import Eviction
from kerasps.dynamic.local.local_rows import LocalRows, LocalSlot, assign, numbers, scatter
from kerasps.dynamic.policies.gone import MOST_GONE
from kerasps.dynamic.policies.usage import this_second

# Eager calls do not say which of them are of one step. So a row stays for so many calls.
_EAGER_CALLS = 64


class LocalUse(LocalSlot):
    """The use of each row, in the columns of the eviction (see `Eviction.columns`).

    Attributes:
        tick: the weight with the number of steps.
    """

    tick: Any

    def begin_with(self, places: np.ndarray, rows: ArrayLike) -> None:
        """Set the use at some places; count steps on from the last use."""
        super().begin_with(places, np.asarray(rows))
        last = np.max(np.asarray(rows)[:, :1], initial=0)
        self.tick.assign(np.maximum(self.tick.numpy(), last))


class LocalUsage:
    """Notes the use of the rows of a table, and says which rows go first.

    Args:
        add_weight: the method of the layer.
        rows: the weight with the rows.
        eviction: the eviction of the table.
    """

    num_parts = 1

    def __init__(
        self, add_weight: Callable[..., keras.Variable], rows: LocalRows, eviction: Eviction
    ) -> None:
        self._rows, self._eviction = rows, eviction
        kind: dict[str, Any] = {
            "dtype": "int32",
            "initializer": "zeros",
            "trainable": False,
            "aggregation": "only_first_replica",
        }
        columns = len(eviction.columns)
        self.use: Any = add_weight(
            name="usage", shape=(rows.shape[0], columns), autocast=False, **kind
        )
        self.tick = add_weight(name="tick", shape=(), **kind)
        self.use.__class__, self.use.table, self.use.tick = LocalUse, rows.table, self.tick
        self.use.initializer = keras.initializers.Zeros()
        rows.table.keep(self.use)
        self._born = time.time_ns() // 1000
        # Of the ids whose rows were given up: how many, the last ones, and the ages of the rows.
        with tf.init_scope(), tf.device("CPU:0"):
            self._numbers, self._gone = numbers(3), numbers(MOST_GONE)

    @property
    def rows_expire(self) -> bool:
        """True if rows have a time to live."""
        return self._eviction.ttl_steps is not None or self._eviction.ttl_seconds is not None

    @property
    def figures(self) -> dict[str, int | float]:
        """The numbers of the table that follow from evictions."""
        evicted, ages, asked = self._numbers.numpy().tolist()
        return {
            "evicted": evicted,
            "mean_age_of_evicted": ages / max(evicted, 1),
            "pushed_ids": asked,
        }

    def gone_since(self, since: Sequence[int]) -> list[list[Any]]:
        """Do the same as `TableAccess.gone_since`, with this process as the only part."""
        count = int(self._numbers.numpy()[0])
        at = np.arange(max(since[0], count - MOST_GONE, 0), count)
        return [[self._born, count, self._gone.numpy()[at % MOST_GONE]]]

    def unused(self, ids: np.ndarray, age: int, *, by_clock: bool) -> np.ndarray:
        """Return those of some ids whose rows were not used for longer, in steps or seconds."""
        use = self.use.find_rows(ids)
        if by_clock:
            is_old = int(this_second()) - use[:, -1] > age
        else:
            is_old = int(self.tick.numpy()) - use[:, 0] > age
        return np.asarray(ids[is_old])

    def begin_step(self) -> None:
        """Count a step."""
        assign(self.tick, self.tick.value + 1)

    def note(self, places: tf.Tensor) -> None:
        """Note that the rows at different places are used."""
        tick, second = tf.fill(tf.shape(places), self.tick.value), this_second()
        before = tf.gather(self.use.value, places)
        columns = {
            "used": lambda _: tick,
            "updates": lambda column: column + tf.cast(before[:, 0] < tick, tf.int32),
            "made": lambda column: column,
            "second": lambda _: tf.fill(tf.shape(places), second),
        }
        self._write(places, columns, before)

    def begin(self, places: tf.Tensor) -> None:
        """Note that the rows at different places are made."""
        tick, second = tf.fill(tf.shape(places), self.tick.value), this_second()
        columns = {
            "used": lambda _: tick,
            "updates": tf.ones_like,
            "made": lambda _: tick,
            "second": lambda _: tf.fill(tf.shape(places), second),
        }
        self._write(places, columns, tf.gather(self.use.value, places))

    def asked(self, count: tf.Tensor) -> None:
        """Count the different ids of a call."""
        self._count(2, count)

    def tell_gone(self, ids: tf.Tensor, places: tf.Tensor) -> None:
        """Note that rows are given up."""
        before = self._numbers[0]
        at = (before + tf.range(tf.size(ids, tf.int64)))[-MOST_GONE:] % MOST_GONE
        tf.raw_ops.ResourceScatterUpdate(
            resource=self._gone.handle, indices=at, updates=ids[-MOST_GONE:]
        )
        ages = self.tick.value - tf.gather(self.use.value, places)[:, 0]
        self._count(1, tf.reduce_sum(tf.cast(ages, tf.int64)))
        self._count(0, tf.size(ids, tf.int64))

    def expired(self, places: tf.Tensor) -> tf.Tensor:
        """Return whether the row at each place was not used for longer than its time to live."""
        use = tf.gather(self.use.value, places)
        is_over = tf.zeros(tf.shape(places), tf.bool)
        if self._eviction.ttl_steps is not None:
            is_over = self.tick.value - use[:, 0] > self._eviction.ttl_steps
        if self._eviction.ttl_seconds is not None:
            is_over |= this_second() - use[:, -1] > math.ceil(self._eviction.ttl_seconds)
        return is_over

    def first_in_order(self, count: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        """Return the places of up to `count` rows that go first, and are in no use now."""
        use = self.use.value[:num_rows]
        if self._eviction.order == "norm":
            rows = tf.cast(self._rows.value[:num_rows], tf.float32)
            scores = tf.reduce_sum(tf.square(rows), -1)
        else:
            name = {"lru": "used", "lfu": "updates", "age": "made"}[self._eviction.order]
            scores = tf.cast(use[:, self._eviction.columns.index(name)], tf.float32)
        is_over = self.expired(tf.range(num_rows))
        scores = tf.where(is_over, -scores.dtype.max / 2, scores)
        stay = self.tick.value - (_EAGER_CALLS if tf.executing_eagerly() else 0)
        may_go = use[:, 0] < stay
        scores = tf.where(may_go, scores, scores.dtype.max)
        most = tf.minimum(count, tf.reduce_sum(tf.cast(may_go, tf.int64)))
        return tf.cast(tf.math.top_k(-scores, tf.cast(most, tf.int32)).indices, tf.int64)

    def _write(self, places: tf.Tensor, columns: dict[str, Any], before: tf.Tensor) -> None:
        names = self._eviction.columns
        new = [columns[name](before[:, index]) for index, name in enumerate(names)]
        scatter(self.use, places, tf.stack(new, 1))

    def _count(self, index: int, number: tf.Tensor) -> None:
        tf.raw_ops.ResourceScatterAdd(
            resource=self._numbers.handle, indices=[index], updates=number[None]
        )
