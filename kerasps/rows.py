"""The rows of tables that a step asks for: which they are, before the step runs, and on which ps.

A table is a variable that a step reads by rows only. What ids a step looks up is for `train_step` to say, so the part of its
graph that leads from the batch to the ids is taken out and run ahead of it; its rows are then pulled together with everything
else. Ids that follow from pulled values, or from rows of another table, are found a round trip later (`Round`); those that
cannot be found ahead, inside a loop or from the table's own rows, make the step pull the table whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.compute import Compute, Inventory
from kerasps.failures import OUT_OF_RANGE
from kerasps.storage import call_with
from kerasps.variables import ParameterServerVariable


class RowRequest:
    """The rows of one table that a step asks for: each once, shard by shard.

    Args:
        ids: int32: of each shard, the places of the rows in it.
        counts: how many these are.
        positions: int32, flat: of each look-up, the place of each id among all rows of the request.
    """

    def __init__(self, ids: Sequence[tf.Tensor], counts: Sequence[tf.Tensor], positions: Sequence[tf.Tensor]) -> None:
        self.ids = list(ids)
        self.counts = list(counts)
        self.positions = list(positions)
        self._split: dict[int, tuple[tf.Tensor, list[tf.Tensor]]] = {}

    def part(self, rows: tf.Tensor, shard: int) -> tf.Tensor:
        """Those of `rows`, a value for each of the request's rows, that belong to `shard`."""
        if len(self.ids) == 1:
            return rows
        if id(rows) not in self._split:
            self._split[id(rows)] = rows, tf.split(rows, tf.stack(self.counts), num=len(self.ids))
        return self._split[id(rows)][1][shard]


def _ask(table: ParameterServerVariable, ids: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
    """The arguments of a `RowRequest`, from the ids of each look-up: integer tensors of any shape."""
    dtype = tf.int64 if any(i.dtype.size > 4 or i.dtype == tf.uint32 for i in ids) else tf.int32
    flat = [tf.reshape(tf.cast(i, dtype), [-1]) for i in ids]
    unique, positions = tf.unique(flat[0] if len(flat) == 1 else tf.concat(flat, 0))
    unique = _in_range(unique, table)
    places = [unique]
    if table.sharding is not None:
        num_shards = table.sharding.num_shards
        shard, place = table.sharding.locate(unique)
        order = tf.concat(tf.dynamic_partition(tf.range(tf.size(unique)), shard, num_shards), 0)
        positions = tf.gather(tf.math.invert_permutation(order), positions)
        places = tf.dynamic_partition(place, shard, num_shards)
    sizes = [tf.size(f) for f in flat]
    return (
        [tf.cast(i, tf.int32) for i in places],
        [tf.size(i) for i in places],
        [positions] if len(flat) == 1 else tf.split(positions, tf.stack(sizes), num=len(flat)),
    )


def _in_range(ids: tf.Tensor, table: ParameterServerVariable) -> tf.Tensor:
    num_rows = table.shape[0]
    # As unsigned numbers, negative ids are larger than any other.
    unsigned = tf.uint64 if ids.dtype == tf.int64 else tf.uint32
    largest = tf.reduce_max(tf.bitcast(ids, unsigned))
    message = (
        f"{OUT_OF_RANGE}: '{table.path}' has {num_rows} rows. Expected: ids from 0 to {num_rows - 1} (`keras.ops.take` counts "
        "negative ones from the end). Received: id"
    )
    check = tf.debugging.Assert(largest < tf.constant(num_rows, unsigned), [message, tf.bitcast(largest, ids.dtype)])
    with tf.control_dependencies([check]):
        return tf.identity(ids)


@dataclass(frozen=True)
class Round:
    """Row requests whose ids are known at the same time, and the function that finds them.

    `inputs` are names of inputs of the compute phase's graph: what the ids follow from; `captures` is what `find` captured.
    """

    tables: list[ParameterServerVariable]
    inputs: list[str]
    find: Any
    captures: list[tf.Tensor]

    def requests(self, handles: dict[int, tf.Tensor], available: dict[str, tf.Tensor]) -> dict[int, RowRequest]:
        """The requests, by the `id` of their tables, in a graph that has `handles` (see `storage.call_with`)."""
        if not self.tables:
            return {}
        found = call_with(handles, self.find, self.captures, *[available[name] for name in self.inputs])
        return {id(table): RowRequest(*own) for table, own in zip(self.tables, found, strict=True)}


class _NotAhead(Exception):
    """Ids that cannot be found ahead of the step; the message says why."""


def plan_rounds(compute: Any, phase: Compute, inventory: Inventory) -> list[Round] | None:
    """The rounds in which the rows of a step are asked for; the first is due with the pull of what is dense.

    Where a table's ids cannot be found ahead, notes in `inventory` that the table is read whole, and returns None.

    Args:
        compute: the concrete function of the compute phase.
        phase: the phase that traced it.
        inventory: what that trace met.
    """
    graph_def = compute.graph.as_graph_def()
    round_of_input = dict.fromkeys(phase.inputs.data, 0)
    for variable, name in zip(inventory.start_values(), phase.inputs.values, strict=True):
        round_of_input[name] = 1 if id(variable) in inventory.pulled else 0
    needed: dict[int, set[str]] = {}
    for key, table in inventory.tables.items():
        try:
            needed[key] = _inputs_of(graph_def, phase.lookups[key], compute)
        except _NotAhead as exc:
            inventory.read_whole(table, str(exc))
    round_of_table: dict[int, int] = {}
    while needed:
        found = {
            key: max((round_of_input[name] for name in names), default=0)
            for key, names in needed.items()
            if names <= set(round_of_input)
        }
        if not found:
            for key in needed:
                inventory.read_whole(inventory.tables[key], "its ids follow from rows of its own")
            break
        for key, number in found.items():
            round_of_table[key] = number
            del needed[key]
            round_of_input.update(dict.fromkeys(phase.inputs.tables[key], number + 1))
    if inventory.grew:
        return None
    return [
        _round(compute, graph_def, phase, [t for key, t in inventory.tables.items() if round_of_table.get(key) == number])
        for number in range(max(round_of_table.values(), default=0) + 1)
    ]


def _round(compute: Any, graph_def: Any, phase: Compute, tables: list[ParameterServerVariable]) -> Round:
    if not tables:
        return Round([], [], None, [])
    lookups = [phase.lookups[id(table)] for table in tables]
    wanted = [tensor for own in lookups for tensor in own]
    inputs = sorted(_inputs_of(graph_def, wanted, compute))
    subgraph = _leading_to(graph_def, wanted)
    names = {node.name for node in subgraph.node}
    captured = {inner: outer for inner, outer in _captures(compute).items() if inner in names}
    specs = [_spec(compute.graph.get_tensor_by_name(f"{name}:0")) for name in inputs]

    def find(*values: tf.Tensor) -> list[Any]:
        capture = tf.compat.v1.get_default_graph().capture
        found = tf.graph_util.import_graph_def(
            subgraph,
            {**dict(zip(inputs, values, strict=True)), **{name: capture(outer) for name, outer in captured.items()}},
            [tensor.name for tensor in wanted],
            name="ids",
        )
        remaining = iter(found)
        return [_ask(table, [next(remaining) for _ in own]) for table, own in zip(tables, lookups, strict=True)]

    function = tf.function(find, autograph=False).get_concrete_function(*specs)
    return Round(tables, inputs, function, list(function.captured_inputs))


def _inputs_of(graph_def: Any, tensors: Sequence[tf.Tensor], compute: Any) -> set[str]:
    """The names of the inputs of the compute phase's graph that `tensors` follow from, captured ones aside."""
    subgraph = _leading_to(graph_def, tensors)
    captures = _captures(compute)
    names = set()
    for node in subgraph.node:
        if node.op == "Placeholder" and node.name not in captures:
            names.add(node.name)
        elif "Random" in node.op and not node.op.startswith("Stateless"):
            raise _NotAhead(f"its ids are drawn at random by {node.op}, which draws anew in each place")
        elif node.op in ("ReadVariableOp", "VarHandleOp"):
            raise _NotAhead("its ids follow from a variable that is assigned in a loop")
    return names


def _leading_to(graph_def: Any, tensors: Sequence[tf.Tensor]) -> Any:
    """The part of a `GraphDef` that `tensors` follow from."""
    nodes = {node.name: node for node in graph_def.node}
    found: dict[str, Any] = {}
    pending = [tensor.op.name for tensor in tensors]
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = nodes[name]
            pending += [source.lstrip("^").split(":")[0] for source in nodes[name].input]
    part = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
    part.node.extend(node for node in graph_def.node if node.name in found)
    for node in part.node:
        node.attr.pop("_class", None)  # with which node to share a device: one, maybe, that is not in the part
    return part


def _captures(compute: Any) -> dict[str, tf.Tensor]:
    captured = compute.captured_inputs
    inner = compute.inputs[len(compute.inputs) - len(captured) :]
    return {tensor.op.name: outer for tensor, outer in zip(inner, captured, strict=True)}


def _spec(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)
