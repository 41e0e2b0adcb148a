"""Updates that couple the rows of a variable, by a norm, a mean over rows or a constraint.

If such a variable is in shards, no ps has all that its update needs, and no ps asks another. A
worker has it: the whole value, which it pulled, and the whole gradient. So the update is traced on
the whole variable, and the graph is cut in two.

* Each ps, on its rows, runs the operations that treat rows one by one. It starts from its current
  slots, under the lock, so workers that push at once lose nothing.
* The worker, from the slots that it pulls for this, runs the operations that couple rows. Its
  results are sent with the push: for Lamb a ratio of two norms, for Adafactor means of rows and
  columns, for Muon the orthogonalised update.

With one worker the result is the update of the whole variable. With several, the worker's results
are based on the values that it pulled, as its gradients are. Operations that are not known to treat
rows one by one count as coupling them: this is exact, but more is sent.

A slot of another shape than its variable is whole on the ps of the first shard. That ps updates it;
the worker sends the inputs that do not depend on the slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from kerasps.step.records.packing import specs_of
from kerasps.step.updates.traced_update import TracedUpdate
from kerasps.step.updates.update_cut import (
    Cut,
    Result,
    cut_other_slots,
    cut_rows,
    is_sliced,
    is_uniform,
)
from kerasps.step.updates.updating import Scalars
from kerasps.variables import ParameterServerVariable, Shard


class Sent(NamedTuple):
    """The values that the worker sends of a whole variable, for the update of its shards.

    Holds tensors or their specs.

    Attributes:
        rows: the values that each ps needs to update its rows.
        other_slots: the values that the ps of the first shard needs to update slots of other
            shapes.
    """

    rows: list[Any]
    other_slots: list[Any]


class CoupledUpdate:
    """The update of one variable, cut in two."""

    def __init__(self, traced: TracedUpdate) -> None:
        self._traced = traced
        self._rows = cut_rows(traced)
        self._other_slots = cut_other_slots(traced)
        self._constants = [tensor.name for tensor in self._rows.constants]

    @property
    def couples_rows(self) -> bool:
        """True if updating one row needs others."""
        varies_by_row = not all(is_uniform(tensor) for tensor in self._rows.constants)
        return bool(self._rows.sent or self._other_slots.results or varies_by_row)

    @property
    def needs_whole(self) -> bool:
        """True if a push carries results that are computed from the whole variable."""
        return bool(self._rows.sent or self._other_slots.sent)

    @property
    def is_reusable(self) -> bool:
        """True if another trace of the same step may use the update.

        It may if the update captured nothing of the first trace's graph.
        """
        return not self._traced.captured

    @property
    def pulled(self) -> list[ParameterServerVariable]:
        """The variable and slots from which the worker computes the values that it sends."""
        traced = self._traced
        needed = {
            source
            for name in [*self._rows.sent, *self._other_slots.sent]
            for source in traced.sources[name]
        }
        return [v for v in traced.state if traced.inputs[v] in needed]

    def sent(
        self,
        gradient: tf.Tensor,
        scalars: Scalars,
        values: Mapping[ParameterServerVariable, tf.Tensor],
    ) -> Sent:
        """Compute the values to send of the whole, on the worker, from `values` of `pulled`."""
        traced = self._traced
        feeds = {traced.gradient: gradient, **traced.feeds_of(scalars), **traced.captured}
        feeds.update({traced.inputs[v]: values[v] for v in self.pulled})
        wanted = [*self._rows.sent, *self._other_slots.sent]
        found = dict(zip(wanted, traced.replay(feeds, wanted, in_order=True), strict=True))
        return Sent(
            [found[name] for name in self._rows.sent],
            [found[name] for name in self._other_slots.sent],
        )

    def sent_to(self, shard: Shard, sent: Sent) -> Sent:
        """Return the values of `sent` that the update of `shard` needs, cut to its rows."""
        rows = [shard.of(t) if is_sliced(self._traced, t) else t for t in sent.rows]
        return Sent(rows, sent.other_slots if shard.index == 0 else [])

    def specs_of(self, shard: Shard) -> Sent:
        """Return the specs of the result of `sent_to`."""
        num_rows = shard.storage.shape[0]
        specs = specs_of(
            Sent(list(self._rows.sent.values()), list(self._other_slots.sent.values()))
        )
        rows = [
            tf.TensorSpec([num_rows, *s.shape[1:]], s.dtype) if is_sliced(self._traced, s) else s
            for s in specs.rows
        ]
        return Sent(rows, specs.other_slots if shard.index == 0 else [])

    def apply(self, shard: Shard, gradient: tf.Tensor, scalars: Scalars, sent: Sent) -> None:
        """Update `shard` on its ps, and with the first shard the slots of other shapes.

        Args:
            shard: a shard of the variable.
            gradient: the gradient of the shard.
            scalars: the scalars that the worker sent.
            sent: the result of `sent_to` for the shard.
        """
        traced = self._traced
        scalar_feeds = traced.feeds_of(scalars)
        constants = zip(self._constants, traced.replay({}, self._constants), strict=True)
        feeds = {
            **scalar_feeds,
            traced.gradient: gradient,
            **{name: shard.of(value) for name, value in constants},
        }
        new = self._worked_out(self._rows, shard.index, feeds, sent.rows)
        if shard.index == 0:
            new += self._worked_out(self._other_slots, 0, scalar_feeds, sent.other_slots)
        # Assigned after both are computed: each starts from the old values.
        for result, storage, value in new:
            (storage.assign_add if result.adds else storage.assign)(value, read_value=False)

    def _worked_out(
        self, cut: Cut, index: int, feeds: dict[str, tf.Tensor], sent: list[tf.Tensor]
    ) -> list[tuple[Result, tf.Variable, tf.Tensor]]:
        """Return the results of a cut, their storages, and their values."""
        stored = {
            name: variable.shards[index].read_value() for name, variable in cut.stored.items()
        }
        received = dict(zip(cut.sent, sent, strict=True))
        values = self._traced.replay(
            {**feeds, **stored, **received}, [result.tensor for result in cut.results]
        )
        return [
            (result, result.variable.shards[index], value)
            for result, value in zip(cut.results, values, strict=True)
        ]
