"""The rows of tables that a step asks for: which they are, before the step runs, and on which ps.

A table is a variable that a step reads by rows only. What ids a step looks up is for `train_step`
to say, so the subgraph of it that leads from the batch to the ids is taken out and run ahead of it;
its rows are then pulled together with everything else. Ids that follow from pulled values, or from
rows of another table, are found a round trip later (`Round`); those that cannot be found ahead,
inside a loop or from the table's own rows, make the step pull the table whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.cluster import OUT_OF_RANGE
from kerasps.step.compute_messages import InputNames
from kerasps.step.identity import ByIdentity
from kerasps.variables import ParameterServerVariable, Shard, call_with

_Lookups = Mapping[ParameterServerVariable, list[tf.Tensor]]


class RowRequest:
    """The rows of one table that a step asks for: each once, shard by shard.

    Args:
        table: the table.
        ids: int32: of each shard, the places of the rows in it.
        counts: how many these are.
        positions: int32, flat: of each look-up, the place of each id among all rows of the request.
    """

    def __init__(
        self,
        table: ParameterServerVariable,
        ids: Sequence[tf.Tensor],
        counts: Sequence[tf.Tensor],
        positions: Sequence[tf.Tensor],
    ) -> None:
        self.positions = list(positions)
        self._table = table
        self._ids = list(ids)
        self._counts = list(counts)
        self._split: ByIdentity[tf.Tensor, list[tf.Tensor]] = ByIdentity()

    def ids_in(self, shard: Shard) -> tf.Tensor:
        """Return the places of the rows in a shard of the table."""
        return self._ids[shard.index]

    def count_in(self, shard: Shard) -> tf.Tensor:
        """Return how many rows of a shard are asked for."""
        return self._counts[shard.index]

    @property
    def num_rows(self) -> tf.Tensor:
        """How many rows are asked for, in all shards."""
        return tf.add_n(self._counts)

    def rows_of(self, shard: Shard, rows: tf.Tensor) -> tf.Tensor:
        """Return those of `rows` that are the shard's.

        `rows` has a value for each of the request's rows, such as a gradient.
        """
        if len(self._ids) == 1:
            return rows
        if rows not in self._split:
            # Split once for all shards.
            self._split[rows] = tf.split(rows, tf.stack(self._counts), num=len(self._ids))
        return self._split[rows][shard.index]


def request_args(table: ParameterServerVariable, ids: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Return the arguments of a `RowRequest` after its table.

    Args:
        table: the table.
        ids: the ids of each look-up: integer tensors of any shape.
    """
    flat = [tf.reshape(i, [-1]) for i in _of_one_dtype(ids)]
    unique, positions = tf.unique(flat[0] if len(flat) == 1 else tf.concat(flat, 0))
    unique = _in_range(unique, table)
    places = [unique]
    if table.sharding is not None:
        num_shards = table.sharding.num_shards
        shard, place = table.sharding.locate(unique)
        # Rows come back shard by shard; `order` says which id each of them is for.
        order = tf.concat(tf.dynamic_partition(tf.range(tf.size(unique)), shard, num_shards), 0)
        positions = tf.gather(tf.math.invert_permutation(order), positions)
        places = tf.dynamic_partition(place, shard, num_shards)
    sizes = [tf.size(f) for f in flat]
    return [
        [tf.cast(i, tf.int32) for i in places],
        [tf.size(i) for i in places],
        [positions] if len(flat) == 1 else tf.split(positions, tf.stack(sizes), num=len(flat)),
    ]


def checked(ids: tf.Tensor, variable: ParameterServerVariable) -> tf.Tensor:
    """Return `ids`, integers of any shape, once it is sure that they are rows of `variable`.

    Others end the step in the error that `kerasps.InputError` is made of.
    """
    (ids,) = _of_one_dtype([ids])
    return _in_range(ids, variable)


def _of_one_dtype(ids: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    dtype = tf.int64 if any(i.dtype.size > 4 or i.dtype == tf.uint32 for i in ids) else tf.int32
    return [tf.cast(i, dtype) for i in ids]


def _in_range(ids: tf.Tensor, table: ParameterServerVariable) -> tf.Tensor:
    num_rows = table.shape[0]
    # As unsigned numbers, negative ids are larger than any other.
    unsigned = tf.uint64 if ids.dtype == tf.int64 else tf.uint32
    largest = tf.reduce_max(tf.bitcast(ids, unsigned))
    message = (
        f"{OUT_OF_RANGE}: '{table.path}' has {num_rows} rows. Expected: ids from 0 to "
        f"{num_rows - 1} (`keras.ops.take` counts negative ones from the end). Received: id"
    )
    check = tf.debugging.Assert(
        largest < tf.constant(num_rows, unsigned), [message, tf.bitcast(largest, ids.dtype)]
    )
    with tf.control_dependencies([check]):
        return tf.identity(ids)


@dataclass(frozen=True)
class Round:
    """Row requests whose ids are known at the same time, and the function that finds them.

    Attributes:
        tables: the tables whose rows are asked for.
        inputs: names of inputs of the compute phase's graph: what the ids follow from.
        find: the concrete function from those inputs to the requests; None without tables.
        captures: what `find` captured.
    """

    tables: list[ParameterServerVariable]
    inputs: list[str]
    find: Any
    captures: list[tf.Tensor]

    def requests(
        self, handles: dict[int, tf.Tensor], known: Mapping[str, tf.Tensor]
    ) -> ByIdentity[ParameterServerVariable, RowRequest]:
        """Return the request of each table, in a step graph that has `handles`.

        Args:
            handles: see `variables.call_with`.
            known: the inputs of the compute phase that are known so far, by name.
        """
        if not self.tables:
            return ByIdentity()
        found = call_with(handles, self.find, self.captures, *[known[name] for name in self.inputs])
        return ByIdentity(
            (table, RowRequest(table, *own)) for table, own in zip(self.tables, found, strict=True)
        )


@dataclass(frozen=True)
class MustReadWhole:
    """The answer that the ids of some tables cannot be found ahead, and why, by the table."""

    reasons: ByIdentity[ParameterServerVariable, str]


def plan_rounds(
    compute: Any,
    names: Sequence[InputNames],
    lookups: _Lookups,
    pulled: Sequence[ParameterServerVariable],
) -> list[Round] | MustReadWhole:
    """Plan the rounds in which the rows of a step are asked for.

    A round is a round trip of requests and rows. The first also brings what is dense. With users,
    friends whose ids are rows of `users`, and items of the batch:

    ```
    round 0   batch ──> ids of users, of items ──> rows of users, of items; dense variables
    round 1             rows of users ──> ids of friends ──> rows of friends
    compute   batch, dense variables, rows of users, items and friends
    ```

    Args:
        compute: the concrete function of the compute phase.
        names: the names of its inputs, by replica.
        lookups: the ids of each look-up, tensors of that graph, by the table; those of the first
            replica, then those of the second.
        pulled: the variables that are read whole.
    """
    graph = _ComputeGraph(compute)
    reasons = ByIdentity(
        (table, why) for table, ids in lookups.items() if (why := graph.why_not_ahead(ids))
    )
    if reasons:
        return MustReadWhole(reasons)
    needed = ByIdentity((table, graph.inputs_of(ids)) for table, ids in lookups.items())
    # Batch, metrics and seeds are there from the start, what is dense after the first round trip.
    known = dict.fromkeys([n for own in names for n in [*own.batch, *own.values.values()]], 0)
    known.update((own.values[variable], 1) for own in names for variable in pulled)
    rounds: ByIdentity[ParameterServerVariable, int] = ByIdentity()
    while len(rounds) < len(needed):
        found = [
            (table, max((known[name] for name in inputs), default=0))
            for table, inputs in needed.items()
            if table not in rounds and inputs <= set(known)
        ]
        if not found:
            return MustReadWhole(
                ByIdentity(
                    (table, "its ids follow from rows of its own")
                    for table in needed
                    if table not in rounds
                )
            )
        for table, number in found:
            rounds[table] = number
            of_table = [name for own in names for name in own.tables[table]]
            known.update(dict.fromkeys(of_table, number + 1))
    return [
        graph.round([(t, lookups[t]) for t in needed if rounds[t] == number])
        for number in range(max(rounds.values(), default=0) + 1)
    ]


class _ComputeGraph:
    """Takes out of the compute phase's graph what leads to the ids of look-ups.

    Args:
        compute: the concrete function of the phase.
    """

    def __init__(self, compute: Any) -> None:
        self._graph = compute.graph
        self._graph_def = compute.graph.as_graph_def()
        self._nodes = {node.name: node for node in self._graph_def.node}
        captured = compute.captured_inputs
        # TensorFlow adds an input for each capture behind the arguments.
        inner = compute.inputs[len(compute.inputs) - len(captured) :]
        self._captures = {
            tensor.op.name: outer for tensor, outer in zip(inner, captured, strict=True)
        }

    def why_not_ahead(self, ids: Sequence[tf.Tensor]) -> str | None:
        """Return why `ids` cannot be found ahead of the step; None where they can."""
        for node in self._leading_to(ids):
            if "Random" in node.op and not node.op.startswith("Stateless"):
                return f"its ids are drawn at random by {node.op}, which draws anew in each place"
            if node.op in ("ReadVariableOp", "VarHandleOp"):
                return "its ids follow from a variable that is assigned in a loop"
        return None

    def inputs_of(self, ids: Sequence[tf.Tensor]) -> set[str]:
        """Return the names of the arguments that `ids` follow from."""
        return {
            node.name
            for node in self._leading_to(ids)
            if node.op == "Placeholder" and node.name not in self._captures
        }

    def round(self, lookups: Sequence[tuple[ParameterServerVariable, list[tf.Tensor]]]) -> Round:
        """Return the round that looks these ids up, by the table."""
        if not lookups:
            return Round([], [], None, [])
        wanted = [tensor for _, ids in lookups for tensor in ids]
        inputs = sorted(self.inputs_of(wanted))
        subgraph = self._subgraph(wanted)
        captured = {
            node.name: self._captures[node.name]
            for node in subgraph.node
            if node.name in self._captures
        }

        def find(*values: tf.Tensor) -> list[Any]:
            capture = tf.compat.v1.get_default_graph().capture
            feeds = dict(zip(inputs, values, strict=True))
            feeds.update((name, capture(outer)) for name, outer in captured.items())
            found = iter(
                tf.graph_util.import_graph_def(
                    subgraph, feeds, [tensor.name for tensor in wanted], name="ids"
                )
            )
            return [request_args(table, [next(found) for _ in ids]) for table, ids in lookups]

        specs = [self._spec(name) for name in inputs]
        function = tf.function(find, autograph=False).get_concrete_function(*specs)
        return Round([t for t, _ in lookups], inputs, function, list(function.captured_inputs))

    def _spec(self, name: str) -> tf.TensorSpec:
        tensor = self._graph.get_tensor_by_name(f"{name}:0")
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    def _leading_to(self, tensors: Sequence[tf.Tensor]) -> list[Any]:
        """Return the nodes that `tensors` follow from, in the order of the graph."""
        found: set[str] = set()
        pending = [tensor.op.name for tensor in tensors]
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                # An input is "node", "node:output" or, for a control edge, "^node".
                pending += [s.lstrip("^").split(":")[0] for s in self._nodes[name].input]
        return [node for node in self._graph_def.node if node.name in found]

    def _subgraph(self, tensors: Sequence[tf.Tensor]) -> Any:
        """Return a `GraphDef` of all that `tensors` follow from."""
        subgraph = tf.compat.v1.GraphDef(
            versions=self._graph_def.versions, library=self._graph_def.library
        )
        subgraph.node.extend(self._leading_to(tensors))
        for node in subgraph.node:
            # With which node to share a device: one, maybe, that is not in the subgraph.
            node.attr.pop("_class", None)
        return subgraph
