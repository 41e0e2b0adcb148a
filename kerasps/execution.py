"""What is scheduled on a worker: pull, compute, push, for each of `steps_per_execution` steps, as one graph.

Steps are unrolled up to a bound, and the unrolled block is looped beyond it. The state that goes from step to step (steps
done, metric states, counters, logs) starts at zero and is returned; or it starts at what the worker holds from the executions
before and stays there (`WorkerTotals`), which spares the coordinator a fetch per execution.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from kerasps.compute import InputNames, Inventory, Update, leaves_of, spec_of
from kerasps.load import StepTraffic, TableTraffic
from kerasps.lookup_tables import LookupTables
from kerasps.packing import Packing
from kerasps.parts import Part, parts_of
from kerasps.placement import ps_index
from kerasps.pull import PulledStep, RoundPull
from kerasps.push import DevicePush
from kerasps.reuse import NAMES
from kerasps.storage import Lookup, anonymous_handle, call_with
from kerasps.variables import ParameterServerVariable
from kerasps.vectors import Vectors

# A `tf.while_loop` across devices costs about 1 ms an iteration, which the steps of a block share. Building the graph costs a
# worker some 0.5 ms an operation, so a deep model, whose steps are slow enough not to feel the loop, is unrolled less.
MAX_UNROLLED_STEPS = 10
MAX_UNROLLED_OPERATIONS = 6000


class WorkerTotals:
    """State that each worker holds for the coordinator: what the steps add up to since it was last collected.

    Args:
        packing: how the state is laid into flat tensors.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        # The name is the same on each worker, so one graph serves all.
        kinds = [("totals", spec.dtype.name, tuple(spec.shape)) for spec in packing.carrier_specs]
        self._names = [NAMES.take(kind) for kind in kinds]
        for kind, name in zip(kinds, self._names, strict=True):
            # Whoever gets it next clears what is there.
            weakref.finalize(self, NAMES.give_back, kind, name).atexit = False
        self.clear = tf.function(self._clear, autograph=False).get_concrete_function()
        self.collect = tf.function(self._collect, autograph=False).get_concrete_function()

    def read(self) -> list[tf.Tensor]:
        """The state, in the graph of an execution."""
        flats = []
        for handle, spec in self._handles():
            flat = tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype)
            flat.set_shape(spec.shape)
            flats.append(flat)
        return self._packing.unpack(flats)

    def write(self, state: Sequence[tf.Tensor]) -> None:
        """Takes the state, in the graph of an execution."""
        for (handle, _), flat in zip(self._handles(), self._packing.pack(state), strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=flat)

    def _handles(self) -> list[tuple[tf.Tensor, tf.TensorSpec]]:
        return [
            (tf.raw_ops.VarHandleOp(dtype=spec.dtype, shape=spec.shape, container="", shared_name=name), spec)
            for name, spec in zip(self._names, self._packing.carrier_specs, strict=True)
        ]

    def _clear(self) -> None:
        self.write([tf.zeros(spec.shape, spec.dtype) for spec in self._packing.specs])

    def _collect(self) -> list[tf.Tensor]:
        flats = self._packing.pack(self.read())
        with tf.control_dependencies(flats):
            self._clear()
        return flats


@dataclass(frozen=True)
class StepPlan:
    """All that an execution needs to know of the traced step.

    `compute` is the concrete function of the compute phase, `captures` what it captured, `lookup_tables` those among it, and
    `inputs` the names of its inputs; `pads_rows` whether it is to
    see tables in a shape that does not change with the number of different ids in a batch; `counter_indices` say which of its
    deltas are counters; `draws` how many seeds a step takes from each generator; `log_names` what the step returned beside
    the metrics; `outputs` the tensors that it predicted, and `joins_outputs` whether those of several steps can be put end to
    end.
    """

    inventory: Inventory
    compute: Any
    captures: list[Any]
    lookup_tables: LookupTables
    inputs: InputNames
    pads_rows: bool
    vectors: Vectors
    pulls: list[RoundPull]
    pushes: list[DevicePush]
    lookup: Lookup
    updates: list[Update]
    deltas: list[ParameterServerVariable]
    counter_indices: list[int]
    draws: list[int]
    log_names: list[str]
    outputs: list[tf.TensorSpec]
    joins_outputs: bool

    @cached_property
    def metrics(self) -> list[ParameterServerVariable]:
        """The metric states, in the order of the state."""
        return list(self.inventory.metrics.values())

    @cached_property
    def seeds(self) -> list[ParameterServerVariable]:
        """The states of the seed generators that a step draws from, in the order of the header."""
        return list(self.inventory.seeds.values())

    @cached_property
    def counters(self) -> list[ParameterServerVariable]:
        """The integer variables that steps add to, in the order of the state."""
        return [self.deltas[i] for i in self.counter_indices]

    @cached_property
    def table_parts(self) -> list[Part]:
        """The shards of tables, in the order in which the state counts their rows."""
        return parts_of(list(self.inventory.tables.values()))

    @cached_property
    def traffic(self) -> StepTraffic:
        """What each step moves, per ps; its tables are in the order of `table_parts`."""
        read: dict[int, int] = {}
        for pull in (pull for round_pull in self.pulls for pull in round_pull.pulls):
            read[ps_index(pull.device)] = read.get(ps_index(pull.device), 0) + pull.packing.num_bytes
        written = {ps_index(push.device): push.packing.num_bytes for push in self.pushes}
        updated = {part for push in self.pushes for part in push.tables}
        tables = [
            TableTraffic(
                ps_index(part.storage.device),
                part.variable.path,
                math.prod(part.spec.shape[1:]) * part.spec.dtype.size,
                part in updated,
            )
            for part in self.table_parts
        ]
        return StepTraffic(read, written, tables)

    @cached_property
    def num_sums(self) -> int:
        """How many tensors of the state are added up: steps done, metric states, counters, rows."""
        return 1 + len(self.metrics) + len(self.counters) + bool(self.table_parts)

    @cached_property
    def state(self) -> Packing:
        """How the state travels: steps done, metric states, counters, rows read of each of `table_parts`, logs."""
        variables = [spec_of(v) for v in [*self.metrics, *self.counters]]
        if self.table_parts:
            variables.append(tf.TensorSpec([len(self.table_parts)], tf.int64))
        logs = [tf.TensorSpec([], tf.float32) for _ in self.log_names]
        return Packing([tf.TensorSpec([], tf.int64), *variables, *logs])

    @cached_property
    def max_unrolled_steps(self) -> int:
        """How many steps are laid out one after the other."""
        functions = [self.compute, *(push.function for push in self.pushes)]
        for round_pull in self.pulls:
            functions += [pull.function for pull in round_pull.pulls]
            functions += [round_pull.round.find] if round_pull.round.tables else []
        graphs = [function.graph for function in functions]
        operations = sum(len(graph.get_operations()) for graph in graphs)
        return max(1, min(MAX_UNROLLED_STEPS, MAX_UNROLLED_OPERATIONS // operations))

    @cached_property
    def header_specs(self) -> list[tf.TensorSpec]:
        """The arguments of an execution beside its data. A step number that nothing draws from stays at home: to send it
        costs a millisecond."""
        return [tf.TensorSpec([1 + 2 * len(self.seeds)], tf.int64)] if self.seeds else []


def build_execution(
    plan: StepPlan,
    source_spec: tf.data.IteratorSpec | Any,
    num_steps: int,
    *,
    checked: bool,
    totals: WorkerTotals | None,
    on_coordinator: bool = False,
) -> Any:
    """The concrete function of an execution: from a source of data, and the header that the plan asks for.

    It returns the state, packed. Where steps predict, it also returns their outputs, end to end, and how long those of each
    step are, of shape `[num_steps, num_outputs]`; or, where outputs cannot be put end to end, those of its only step.

    Args:
        plan: the step.
        source_spec: the spec of an iterator, whose resource is the argument then, or of a list of batches, which is.
        num_steps: steps to do.
        checked: whether the iterator may end within the execution.
        totals: where the state stays on the worker; None returns it.
        on_coordinator: whether it is the coordinator that runs it, and not a worker.
    """
    reads = isinstance(source_spec, tf.data.IteratorSpec)
    blocks, rest = divmod(num_steps, plan.max_unrolled_steps)
    if not reads or plan.outputs or (blocks < 2 and num_steps <= MAX_UNROLLED_STEPS):
        blocks, rest = 0, num_steps

    def steps(source: Any, *headers: tf.Tensor) -> Any:
        step = _Step(plan, headers[0] if headers else None, on_coordinator)
        if reads:
            source = tf.nest.pack_sequence_as(source_spec, [source], expand_composites=True)
        state = [tf.zeros(spec.shape, spec.dtype) for spec in plan.state.specs]

        outputs: list[list[tf.Tensor]] = []

        def unrolled(state: list[tf.Tensor], count: int) -> list[tf.Tensor]:
            if checked and count > 1 and not plan.outputs:
                return step.while_data(source, state, count)
            for index in range(count):
                if checked:
                    state, predicted = step.if_data(source, state)
                else:
                    state, predicted = step(source.get_next() if reads else source[index], state)
                outputs.append(predicted)
            return state

        if blocks:
            (_, *state) = tf.while_loop(
                lambda block, *_: block < blocks,
                lambda block, *state: (block + 1, *unrolled(list(state), plan.max_unrolled_steps)),
                (tf.constant(0), *state),
                parallel_iterations=1,
            )
        state = plan.state.pack(unrolled(state, rest))
        if not plan.outputs:
            return state
        if not plan.joins_outputs:
            return state, outputs[0], []
        sizes = tf.stack([tf.stack([tf.shape(leaf)[0] for leaf in predicted]) for predicted in outputs])
        return state, [tf.concat(leaves, 0) for leaves in zip(*outputs, strict=True)], sizes

    # The resource and not the iterator: to take an iterator apart costs the coordinator 0.15 ms per call.
    arguments = [tf.TensorSpec([], tf.resource) if reads else source_spec, *plan.header_specs]
    if totals is None:
        return tf.function(steps, autograph=False).get_concrete_function(*arguments)
    # A graph that returns nothing is not optimized, so the steps stay a function of their own, which returns something.
    inner = tf.function(steps, autograph=False, experimental_attributes={"_noinline": True}).get_concrete_function(*arguments)

    def steps_into_totals(*arguments: tf.Tensor) -> list[tf.Tensor]:
        state = plan.state.unpack(inner(*arguments))
        sums = [before + new for before, new in zip(totals.read()[: plan.num_sums], state[: plan.num_sums], strict=True)]
        totals.write([*sums, *state[plan.num_sums :]])
        return []

    return tf.function(steps_into_totals, autograph=False).get_concrete_function(*arguments)


class _Step:
    """Adds the operations of one step to the graph of an execution."""

    def __init__(self, plan: StepPlan, header: tf.Tensor | None, on_coordinator: bool) -> None:
        self._plan = plan
        self._header = header
        self._handles = plan.lookup()
        if not on_coordinator:
            self._handles.update(plan.lookup_tables.handles())
        self._scratch = {key: anonymous_handle(spec.shape, spec.dtype) for key, spec in plan.inventory.scratch.items()}

    def __call__(self, data: Any, state: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The state after the step, and what it predicted."""
        plan = self._plan
        steps, num_metrics, num_counters = state[0], len(plan.metrics), len(plan.counters)
        started = [*state[1 : 1 + num_metrics], *self._seeds(steps)]
        pulled = PulledStep()
        dense, tables = self._pull(data, started, pulled)
        values = [*dense, *started]
        for handle, value in self._scratch_values(values):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
        scratch = list(self._scratch.values())
        outputs = call_with(self._handles, plan.compute, plan.captures, data, values, tables, scratch)
        if plan.pads_rows:
            outputs = self._without_padding(outputs, pulled)
        for push in plan.pushes:
            push(self._handles, outputs, pulled)
        added = [outputs["deltas"][i] for i in plan.counter_indices]
        counters = [c + a for c, a in zip(state[1 + num_metrics : 1 + num_metrics + num_counters], added, strict=True)]
        rows = []
        if plan.table_parts:
            counts = [pulled.requests[id(part.variable)].counts[part.shard] for part in plan.table_parts]
            rows = [state[plan.num_sums - 1] + tf.cast(tf.stack(counts), tf.int64)]
        return [steps + 1, *outputs["metrics"], *counters, *rows, *outputs["logs"]], outputs["outputs"]

    def if_data(self, iterator: Any, state: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """A step if the iterator has a batch left, else nothing."""
        batch = iterator.get_next_as_optional()

        def skip() -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            shapes = [[] if spec.shape.rank is None else [d or 0 for d in spec.shape] for spec in self._plan.outputs]
            nothing = [tf.zeros(shape, spec.dtype) for shape, spec in zip(shapes, self._plan.outputs, strict=True)]
            return [tf.identity(s) for s in state], nothing

        state, outputs = tf.cond(batch.has_value(), lambda: self(batch.get_value(), state), skip)
        return list(state), list(outputs)

    def while_data(self, iterator: Any, state: list[tf.Tensor], count: int) -> list[tf.Tensor]:
        """The state after `count` steps, or after fewer, of which the iterator has batches left.

        One look for all of them: to decide takes a transfer to every task that a step asks. Where the last batch is there, the
        steps are laid out one after the other; else those that are there, once in an epoch, are looped over.
        """
        batches = [iterator.get_next_as_optional() for _ in range(count)]

        def all_steps() -> list[tf.Tensor]:
            after = state
            for batch in batches:
                after, _ = self(batch.get_value(), after)
            return after

        def steps_left() -> list[tf.Tensor]:
            spec = tf.OptionalSpec(iterator.element_spec)
            (variants,) = zip(*(tf.nest.flatten(batch, expand_composites=True) for batch in batches), strict=True)
            with tf.device("/device:CPU:0"):  # where the iterator is
                left = tf.stack(variants)

            def batch_at(index: tf.Tensor) -> Any:
                with tf.device("/device:CPU:0"):
                    return tf.nest.pack_sequence_as(spec, [tf.gather(left, index)], expand_composites=True)

            (_, *after) = tf.while_loop(
                lambda index, *_: batch_at(index).has_value(),
                lambda index, *state: (index + 1, *self(batch_at(index).get_value(), list(state))[0]),
                (tf.constant(0), *state),
                parallel_iterations=1,
            )
            return list(after)

        return list(tf.cond(batches[-1].has_value(), all_steps, steps_left))

    def _pull(self, data: Any, started: list[tf.Tensor], pulled: PulledStep) -> tuple[list[tf.Tensor], list[list[tf.Tensor]]]:
        """The values of dense variables and what tables are, in the order of the compute function's arguments."""
        inventory, names = self._plan.inventory, self._plan.inputs
        available = dict(zip(names.data, leaves_of(data), strict=True))
        available.update(zip(names.values[len(inventory.pulled) :], started, strict=True))
        dense: dict[int, tf.Tensor] = {}
        tables: dict[int, list[tf.Tensor]] = {}
        for pull in self._plan.pulls:
            values, rows = pull(self._handles, available, pulled)
            if not dense:
                dense = values
                available.update(zip(names.values, [dense[key] for key in inventory.pulled], strict=False))
            for key, table_rows in rows.items():
                positions = pulled.requests[key].positions
                if self._plan.pads_rows:
                    missing = tf.add_n([tf.size(p) for p in positions]) - tf.shape(table_rows)[0]
                    table_rows = tf.pad(table_rows, [[0, missing], *[[0, 0]] * (len(table_rows.shape) - 1)])
                tables[key] = [table_rows, *positions]
                available.update(zip(names.tables[key], tables[key], strict=True))
        return [dense[key] for key in inventory.pulled], [tables[key] for key in inventory.tables]

    def _without_padding(self, outputs: dict[str, Any], pulled: PulledStep) -> dict[str, Any]:
        updates = []
        for described, update in zip(self._plan.updates, outputs["updates"], strict=True):
            tensors = list(update["tensors"])
            for index, variable in enumerate(described.variables, start=described.num_scalars):
                if id(variable) in pulled.requests:
                    tensors[index] = tensors[index][: tf.add_n(pulled.requests[id(variable)].counts)]
            updates.append({**update, "tensors": tensors})
        return {**outputs, "updates": updates}

    def _seeds(self, steps: tf.Tensor) -> list[tf.Tensor]:
        seeds: list[tf.Tensor] = []
        if self._header is None:
            return seeds
        for i, (variable, draws) in enumerate(zip(self._plan.seeds, self._plan.draws, strict=True)):
            seed, counter = self._header[1 + 2 * i], self._header[2 + 2 * i]
            seeds.append(tf.cast(tf.stack([seed, counter + steps * draws]), variable.storage.dtype))
        return seeds

    def _scratch_values(self, values: list[tf.Tensor]) -> list[tuple[tf.Tensor, tf.Tensor]]:
        start: dict[Hashable, tf.Tensor] = {}
        for variable, value in zip(self._plan.inventory.start_values(), values, strict=True):
            start[id(variable)] = start["base", id(variable)] = value
        specs = self._plan.inventory.scratch
        return [
            (handle, start[key] if key in start else tf.zeros([d or 0 for d in specs[key].shape], specs[key].dtype))
            for key, handle in self._scratch.items()
        ]
