"""Updates that couple the rows of a variable: by a norm, a mean over rows, an orthogonalised matrix, a constraint.

Where such a variable is in shards, no ps has all that its update needs, and no ps asks another. A worker does have it: the
whole value, which it pulled, and the whole gradient. So the update is traced on the whole variable and the graph is cut in two.

* On each ps, on the rows that it holds, runs all that treats rows one by one: it starts from the slots as they are there, under
  the lock, and workers that push at once lose nothing.
* On the worker, from the slots that it pulls for this, runs what couples rows. Its results travel with the push: of Lamb a
  ratio of two norms, of Adafactor means of rows and columns, of Muon the orthogonalised update.

With one worker that is the update of the whole variable. With several, what the worker worked out is of the values that it
pulled, as its gradients are. Operations that are not known to treat rows one by one are taken to couple them: exact, but
more to send.

A slot of another shape than its variable lies whole beside the first shard (its home), which updates it from what does not
follow from it, sent by the worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from kerasps.cut import cut_home, cut_rows, is_sliced, is_uniform
from kerasps.parts import Part
from kerasps.traced_update import TracedUpdate
from kerasps.variables import ParameterServerVariable


class CoupledUpdate:
    """The update of one variable, cut in two."""

    def __init__(self, traced: TracedUpdate) -> None:
        self._traced = traced
        self._rows = cut_rows(traced)
        self._home = cut_home(traced)
        self._constants = [tensor.name for tensor in self._rows.constants]

    @property
    def couples_rows(self) -> bool:
        """Whether rows cannot be updated by themselves."""
        tells_rows_apart = not all(is_uniform(tensor) for tensor in self._rows.constants)
        return bool(self._rows.sent or self._home.results or tells_rows_apart)

    @property
    def needs_whole(self) -> bool:
        """Whether something of the whole travels with a push."""
        return bool(self._rows.sent or self._home.sent)

    @property
    def is_reusable(self) -> bool:
        """Whether another trace of the same step may use it: it refers to nothing in the graph of the first."""
        return not self._traced.captured

    @property
    def pulled(self) -> list[ParameterServerVariable]:
        """The variable and slots from which the worker works out what it sends, as far as it needs them."""
        traced = self._traced
        needed = {source for name in [*self._rows.sent, *self._home.sent] for source in traced.sources[name]}
        return [v for v in traced.state if traced.inputs[id(v)] in needed]

    def sent(self, gradient: tf.Tensor, scalars: Sequence[tf.Tensor], values: dict[int, tf.Tensor]) -> list[tf.Tensor]:
        """What is sent of the whole, on the worker, from `values` of `pulled` by their `id`."""
        traced = self._traced
        feeds = {traced.gradient: gradient, **dict(zip(traced.scalars, scalars, strict=True)), **traced.captured}
        feeds.update({traced.inputs[id(v)]: values[id(v)] for v in self.pulled})
        return traced.replay(feeds, [*self._rows.sent, *self._home.sent], in_order=True)

    def sent_to(self, part: Part, sent: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Those of `sent` that the update of `part` needs, and of them the rows that it has."""
        count = len(self._rows.sent)
        tensors = [part.of(t) if is_sliced(self._traced, t) else t for t in sent[:count]]
        return [*tensors, *sent[count:]] if part.shard == 0 else tensors

    def specs_of(self, part: Part) -> list[tf.TensorSpec]:
        """The specs of what `sent_to` returns."""
        num_rows = part.storage.shape[0]
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in self._rows.sent.values()]
        specs = [tf.TensorSpec([num_rows, *s.shape[1:]], s.dtype) if is_sliced(self._traced, s) else s for s in specs]
        home = [tf.TensorSpec(t.shape, t.dtype) for t in self._home.sent.values()]
        return [*specs, *home] if part.shard == 0 else specs

    def apply(self, part: Part, gradient: tf.Tensor, scalars: Sequence[tf.Tensor], sent: Sequence[tf.Tensor]) -> None:
        """Updates `part` on its ps, and with the first part the slots of other shapes.

        Args:
            part: a shard of the variable.
            gradient: that of the part.
            scalars: the learning rate, the shared state and, where it is sent, the scale of clipping.
            sent: what `sent_to` returned for the part.
        """
        traced, count = self._traced, len(self._rows.sent)
        known = dict(zip(traced.scalars, scalars, strict=True))
        constants = zip(self._constants, traced.replay({}, self._constants), strict=True)
        of_rows = {name: part.of(value) for name, value in constants}
        cuts = [(self._rows, part.shard, sent[:count], {traced.gradient: gradient, **of_rows})]
        if part.shard == 0:
            cuts.append((self._home, 0, sent[count:], {}))
        new = []
        for cut, shard, received, others in cuts:
            stored = {name: variable.shards[shard].read_value() for name, variable in cut.stored.items()}
            feeds = {**known, **others, **stored, **dict(zip(cut.sent, received, strict=True))}
            values = traced.replay(feeds, [result.tensor for result in cut.results])
            new += [(r, r.variable.shards[shard], value) for r, value in zip(cut.results, values, strict=True)]
        for result, storage, value in new:
            (storage.assign_add if result.adds else storage.assign)(value, read_value=False)
