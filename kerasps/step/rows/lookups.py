"""The rows of tables that a step asks for, computed before the step runs.

A table is a variable that a step reads by rows only. `train_step` computes the ids that it looks
up. So the part of its graph that leads from the batch to the ids is cut out and runs ahead of the
step. The rows are then pulled together with all other values. Ids that depend on pulled values, or
on rows of another table, are found a round trip later (`Round`). If ids cannot be found ahead,
inside a loop or because they depend on the table's own rows, the step pulls the table whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.step.contract.compute_messages import InputNames
from kerasps.step.draws.random_operations import calls, functions_with, repeats
from kerasps.step.records.identity import ByIdentity
from kerasps.step.rows.groups import TableGroup
from kerasps.step.rows.row_requests import Asked, LookupIds, RowRequest, ask
from kerasps.variables import ParameterServerVariable, call_with

_Lookups = Mapping[ParameterServerVariable, list[LookupIds]]
_Divide = Callable[[Iterable[ParameterServerVariable]], list[TableGroup]]


@dataclass(frozen=True)
class Round:
    """Row requests whose ids are known at the same time, and the function that computes them."""

    groups: list[TableGroup]  # the tables whose rows are requested
    inputs: list[str]  # the names of the compute phase's inputs on which the ids depend
    find: Any  # the concrete function from those inputs to the requests; None without tables
    captures: list[tf.Tensor]  # the tensors that `find` captured

    @property
    def tables(self) -> list[ParameterServerVariable]:
        """The tables of all groups."""
        return [table for group in self.groups for table in group.tables]

    def requests(
        self, handles: dict[int, tf.Tensor], known: Mapping[str, tf.Tensor]
    ) -> list[RowRequest]:
        """Return the request of each group, in a step graph that has `handles`.

        Args:
            known: the inputs of the compute phase that are known so far, by name.
        """
        if not self.groups:
            return []
        found = call_with(handles, self.find, self.captures, *[known[name] for name in self.inputs])
        return [
            RowRequest(group, Asked(*fields))
            for group, fields in zip(self.groups, found, strict=True)
        ]


@dataclass(frozen=True)
class MustReadWhole:
    """Says that the ids of some tables cannot be found ahead, and why, by the table."""

    reasons: ByIdentity[ParameterServerVariable, str]


def plan_rounds(
    compute: tf.types.experimental.ConcreteFunction,
    names: Sequence[InputNames],
    lookups: _Lookups,
    pulled: Sequence[ParameterServerVariable],
    divide: _Divide,
) -> list[Round] | MustReadWhole:
    """Plan the rounds in which a step asks for rows.

    A round is a round trip of requests and rows. The first also pulls the dense variables. In an
    example with users, friends whose ids are rows of `users`, and items of the batch:

    ```
    round 0   batch ──> ids of users, of items ──> rows of users, of items; dense variables
    round 1             rows of users ──> ids of friends ──> rows of friends
    compute   batch, dense variables, rows of users, items and friends
    ```

    Args:
        lookups: the look-ups, as tensors of that graph, by the table; those of the first replica,
            then those of the second.
    """
    graph = _ComputeGraph(compute)
    ids_of = ByIdentity((table, [use.ids for use in found]) for table, found in lookups.items())
    reasons = ByIdentity(
        (table, why) for table, ids in ids_of.items() if (why := graph.why_not_ahead(ids))
    )
    if reasons:
        return MustReadWhole(reasons)
    needed = ByIdentity((table, graph.inputs_of(ids)) for table, ids in ids_of.items())
    # Batch, metrics and seeds are known from the start, dense values after the first round trip.
    at_start = [n for replica in names for n in [*replica.batch, *replica.values.values()]]
    known = dict.fromkeys(at_start, 0)
    known.update((replica.values[variable], 1) for replica in names for variable in pulled)
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
                    (table, "its ids depend on rows of the same table")
                    for table in needed
                    if table not in rounds
                )
            )
        for table, number in found:
            rounds[table] = number
            known.update((n, number + 1) for replica in names for n in replica.tables[table])
    return [
        graph.round(divide(t for t in needed if rounds[t] == number), lookups)
        for number in range(max(rounds.values(), default=0) + 1)
    ]


class _ComputeGraph:
    """Cuts the part that computes the ids of look-ups out of the compute phase's graph."""

    def __init__(self, compute: tf.types.experimental.ConcreteFunction) -> None:
        self._graph = compute.graph
        self._graph_def = compute.graph.as_graph_def()
        self._nodes = {node.name: node for node in self._graph_def.node}
        library = self._graph_def.library.function
        self._drawing = functions_with(lambda node: not repeats(node), library)
        captured = compute.captured_inputs
        # TensorFlow adds an input for each capture behind the arguments.
        inner = compute.inputs[len(compute.inputs) - len(captured) :]
        self._captures = {
            tensor.op.name: outer for tensor, outer in zip(inner, captured, strict=True)
        }

    def why_not_ahead(self, ids: Sequence[tf.Tensor]) -> str | None:
        """Return why `ids` cannot be found ahead of the step; None if they can."""
        for node in self._leading_to(ids):
            if not repeats(node) or calls(node, self._drawing):
                return f"its ids are drawn at random by {node.op}, which would draw others ahead"
            if node.op in ("ReadVariableOp", "VarHandleOp"):
                return "its ids depend on a variable that is assigned in a loop"
            if node.op == "PlaceholderWithDefault":
                # The index of a call of `tf.vectorized_map`; outside of such a call it is 0.
                return "its ids differ between the calls of a `tf.vectorized_map`"
        return None

    def inputs_of(self, ids: Sequence[tf.Tensor]) -> set[str]:
        """Return the names of the arguments on which `ids` depend."""
        return {
            node.name
            for node in self._leading_to(ids)
            if node.op == "Placeholder" and node.name not in self._captures
        }

    def round(self, groups: list[TableGroup], lookups: _Lookups) -> Round:
        """Return the round that looks up rows of these tables."""
        if not groups:
            return Round([], [], None, [])
        wanted = [use.ids for group in groups for table in group.tables for use in lookups[table]]
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
            found = tf.graph_util.import_graph_def(
                subgraph, feeds, [tensor.name for tensor in wanted], name="ids"
            )
            remaining = iter(found)
            return [
                ask(
                    group,
                    [
                        [LookupIds(next(remaining), use.from_end) for use in lookups[table]]
                        for table in group.tables
                    ],
                )
                for group in groups
            ]

        specs = [self._spec(name) for name in inputs]
        function = tf.function(find, autograph=False).get_concrete_function(*specs)
        return Round(groups, inputs, function, list(function.captured_inputs))

    def _spec(self, name: str) -> tf.TensorSpec:
        tensor = self._graph.get_tensor_by_name(f"{name}:0")
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    def _leading_to(self, tensors: Sequence[tf.Tensor]) -> list[Any]:
        """Return the nodes on which `tensors` depend, in the order of the graph."""
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
        """Return a `GraphDef` of all nodes on which `tensors` depend."""
        subgraph = tf.compat.v1.GraphDef(
            versions=self._graph_def.versions, library=self._graph_def.library
        )
        subgraph.node.extend(self._leading_to(tensors))
        for node in subgraph.node:
            # Names the node to share a device with, which may be missing in the subgraph.
            node.attr.pop("_class", None)
        return subgraph
