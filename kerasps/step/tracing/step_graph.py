"""The step graph: one graph with pull, compute and push for each step of an execution.

It unrolls steps up to a bound. Beyond the bound, it loops over the unrolled block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from kerasps.errors import KeraspsError
from kerasps.runtime.fetching import sent
from kerasps.step.phases.step_context import ReplicaInputs, StepContext, batch_inputs
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.tracing.overlap import Overlap
from kerasps.step.tracing.plan import MAX_UNROLLED_STEPS, StepPlan
from kerasps.step.tracing.runners import Runner, on_cpu
from kerasps.step.tracing.state import Header, StepState, Ticket, WorkerVariables
from kerasps.variables import ParameterServerVariable, anonymous_handle

# Name scopes of two phases (`compute_phase.NAME_SCOPE` is that of the third), by which
# `kerasps trace` finds their operations.
PULL_SCOPE = "pull"
PUSH_SCOPE = "push"


class StepResult(NamedTuple):
    """The result of one step or of several steps."""

    state: StepState  # the state after the last step
    predicted: list[list[tf.Tensor]]  # the predicted tensors of each batch


@dataclass(frozen=True)
class _Layout:
    """The division of an execution's batches into steps."""

    spec: Any  # of an iterator (`tf.data.IteratorSpec`), or of a list of batches
    checked: bool  # whether the iterator may end within the execution
    blocks: int  # the number of blocks of unrolled steps in the loop
    block: list[int]  # the number of batches that each step of a block takes
    rest: list[int]  # likewise, for the steps that are unrolled behind the loop

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        spec: tf.data.IteratorSpec | list[Any],
        num_batches: int,
        *,
        checked: bool,
    ) -> _Layout:
        """Choose the layout of `num_batches` batches.

        A step takes one batch per replica. Each batch left over makes a step.
        """
        whole, left_over = divmod(num_batches, plan.num_replicas)
        blocks, rest = divmod(whole, plan.max_unrolled_steps)
        is_list = not isinstance(spec, tf.data.IteratorSpec)
        # Predictions cannot leave a loop, and a loop cannot index a list. Behind a loop, its next
        # block runs dead through all tasks, step by step.
        most = max(MAX_UNROLLED_STEPS, plan.max_unrolled_steps)
        if is_list or plan.outputs or (blocks < 2 and whole <= most):
            blocks, rest = 0, whole
        size = plan.num_replicas
        block = [size] * plan.max_unrolled_steps
        return cls(spec, checked, blocks, block, [size] * rest + [1] * left_over)

    @property
    def reads(self) -> bool:
        """True if batches come from an iterator."""
        return isinstance(self.spec, tf.data.IteratorSpec)


def build_step_graph(
    plan: StepPlan,
    source_spec: tf.data.IteratorSpec | list[Any],
    num_batches: int,
    *,
    checked: bool,
    variables: WorkerVariables,
    runner: Runner,
) -> Any:
    """Return the concrete function of an execution: (worker handles, data source[, header]).

    The worker handles are those of the worker's variables; on the coordinator there are none. The
    function takes a header only if the steps draw seeds. It returns the packed state. If the steps
    predict, it also returns their outputs, end to end, and the lengths of each batch's outputs, of
    shape `[num_batches, num_outputs]`. Outputs that cannot be put end to end come from one batch
    only, and without lengths.

    Args:
        source_spec: the spec of an iterator, whose resource is then the argument, or of a list of
            batches, which is then the argument.
        checked: whether the iterator may end within the execution.
    """
    layout = _Layout.of(plan, source_spec, num_batches, checked=checked)

    # The compute phase names its device. All other operations are on the CPU of the task.
    @on_cpu
    def steps(packed: tf.Tensor, source: object, *header: tf.Tensor) -> Any:
        step = _Step(plan, Ticket.from_tensor(packed), *header, copies_tables=runner.is_on_worker)
        if layout.reads:
            source = tf.nest.pack_sequence_as(source_spec, [source], expand_composites=True)
        state, outputs = _all_steps(step, layout, source)
        flats = plan.state.pack(state)
        return (flats, *_joined(plan, outputs)) if plan.outputs else flats

    # The resource and not the iterator: to take an iterator apart costs the coordinator 0.15 ms per
    # call. A header that no step draws from is not sent: sending it costs a millisecond.
    arguments = [
        tf.TensorSpec([], tf.resource) if layout.reads else source_spec,
        *([Header.spec()] if plan.seeds else []),
    ]
    # A separate function: where a graph reads a variable of the worker, look-ups on ps wait for
    # that read.
    inner = tf.function(
        steps,
        autograph=False,
        experimental_attributes=None if runner.inlines else {"_noinline": True},
    ).get_concrete_function(variables.ticket_spec, *arguments)
    _check_devices(plan, inner.graph)
    return runner.function(inner, plan, variables, arguments)


def _check_devices(plan: StepPlan, graph: tf.Graph) -> None:
    """Check that every call of a compute phase in a step graph names the device of the phase.

    Without one, TensorFlow places the call on the CPU and does not say so.

    Raises KeraspsError if a call names another device or none.
    """
    phases = [step_plan.compute for step_plan in (plan, plan.single) if step_plan is not None]
    expected = {phase.function.name: phase.device for phase in phases}
    graph_def = graph.as_graph_def()
    bodies = [graph_def.node, *(function.node_def for function in graph_def.library.function)]
    for node in (node for body in bodies for node in body):
        name = _name_of_call(node)
        if name not in expected:
            continue
        spec = tf.DeviceSpec.from_string(node.device)
        device = f"{spec.device_type}:{spec.device_index}"
        if device != expected[name]:
            raise KeraspsError(
                "The compute phase of a step graph is not on its device. Expected: "
                f"{expected[name]}. Received: {node.device!r} for {node.name}. This is a defect of "
                "kerasps: please report it."
            )


def _name_of_call(node: tf.compat.v1.NodeDef) -> bytes:
    """Return the name of the function that a node calls, or the name of its operation."""
    is_call = node.op in ("PartitionedCall", "StatefulPartitionedCall")
    name = str(node.attr["f"].func.name if is_call else node.op)
    return name.encode()


def _all_steps(
    step: _Step, layout: _Layout, source: object
) -> tuple[StepState, list[list[tf.Tensor]]]:
    """Return the state after all steps, and the predictions for each batch of unrolled steps."""
    plan = step.plan
    state = plan.state.specs.start(plan.joins)
    if layout.blocks:

        def block(number: tf.Tensor, state: StepState) -> tuple[tf.Tensor, StepState]:
            return number + 1, _unrolled(step, layout, source, state, layout.block)[0]

        _, state = tf.while_loop(
            lambda number, _: number < layout.blocks,
            block,
            (tf.constant(0), state),
            parallel_iterations=1,
        )
        if step.overlap is not None:
            step.overlap.after_loop(state.steps)
    return _unrolled(step, layout, source, state, layout.rest)


def _unrolled(
    step: _Step, layout: _Layout, source: Any, state: StepState, sizes: list[int]
) -> tuple[StepState, list[list[tf.Tensor]]]:
    """Return the state after some unrolled steps, and their predictions.

    `sizes` has the number of batches that each step takes.
    """
    if layout.checked and len(sizes) > 1 and not step.plan.outputs:
        return step.while_data(source, state, sizes), []
    if not layout.checked:
        batches = [
            _next_batch(source, layout.spec) if layout.reads else source[index]
            for index in range(sum(sizes))
        ]
        return step.in_turn(batches, state, sizes)
    outputs = []
    for size in sizes:
        state, predicted = step.if_data(source, state, size)
        outputs += predicted
    return state, outputs


def _next_batch(iterator: tf.data.Iterator, spec: tf.data.IteratorSpec) -> Any:
    """Return the next batch of an iterator."""
    # Rebuilt for each batch: TensorFlow warns about an iterator that is asked often in one graph.
    handles = tf.nest.flatten(iterator, expand_composites=True)
    batch = tf.nest.pack_sequence_as(spec, handles, expand_composites=True).get_next()
    # An operation that has waited hands each operation behind it to another thread. So one
    # operation follows here, not one for each array of the batch.
    return sent(batch)


def _joined(plan: StepPlan, outputs: list[list[tf.Tensor]]) -> tuple[list[tf.Tensor], Any]:
    """Return the predictions of the steps, end to end, and the lengths of each batch's."""
    if not plan.joins_outputs:
        (only,) = outputs
        return only, []
    sizes = tf.stack([tf.stack([tf.shape(leaf)[0] for leaf in predicted]) for predicted in outputs])
    return [tf.concat(leaves, 0) for leaves in zip(*outputs, strict=True)], sizes


class _Step:
    """Adds the operations of one step to a step graph."""

    def __init__(
        self, plan: StepPlan, ticket: Ticket, *header: tf.Tensor, copies_tables: bool
    ) -> None:
        self.plan = plan
        self._ticket = ticket
        num_seeds = len(plan.seeds)
        self._seeds = Header.from_tensor(header[0], num_seeds).seeds if header else []
        self._handles = plan.find_handles()
        # Makes steps overlap; None if each step waits for the one before.
        self.overlap = Overlap(plan) if plan.overlaps else None
        if copies_tables:
            for step_plan in (plan, plan.single):
                self._handles.update({} if step_plan is None else step_plan.lookup_tables.handles())
        self._scratch = [
            {
                key: anonymous_handle(spec.shape, spec.dtype)
                for key, spec in plan.inventory.scratch.items()
            }
            for _ in plan.names
        ]

    def in_turn(
        self, batches: Sequence[object], state: StepState, sizes: Sequence[int]
    ) -> StepResult:
        """Add one step per entry of `sizes` (its number of batches); the first uses `state`."""
        ends = itertools.accumulate(sizes)
        of_steps = [batches[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        outputs = []
        for step_batches, asked in zip(of_steps, self._ask_ahead(of_steps), strict=True):
            state, predicted = self(step_batches, state, asked)
            outputs += predicted
        return StepResult(state, outputs)

    def _ask_ahead(self, of_steps: Sequence[Sequence[object]]) -> list[dict[Any, Any]]:
        """Ask for the rows of consecutive steps whose ids follow from their batches."""
        asked: list[dict[Any, Any]] = []
        for size, alike in itertools.groupby(of_steps, len):
            plan = self._plan_of(size)
            steps = [batch_inputs(plan.names, batches) for batches in alike]
            asked += plan.pull.ask_ahead(self._handles, steps)
        return asked

    def _plan_of(self, num_batches: int) -> StepPlan:
        single = self.plan.single
        return single if single is not None and num_batches == 1 else self.plan

    def __call__(
        self,
        batches: Sequence[object],
        state: StepState,
        asked: Mapping[object, object] | None = None,
    ) -> StepResult:
        """Add a step that starts from `state`, with a replica for each batch.

        `asked` has the requests that were sent ahead for this step.
        """
        plan = self._plan_of(len(batches))
        replicas = [
            ReplicaInputs(scratch, names, batch, self._start(state, index))
            for index, (scratch, names, batch) in enumerate(
                zip(self._scratch, plan.names, batches, strict=False)
            )
        ]
        lanes = self._lanes_at(state.steps)
        step = StepContext(self._handles, replicas, lanes, asked=asked, device=plan.converts_on)
        if self.overlap is not None:
            self.overlap.before_pull(step)
        with tf.name_scope(PULL_SCOPE):
            plan.pull.add_to(step)
        plan.push.rule.after_pull(step)
        if self.overlap is not None:
            self.overlap.after_pull(step)
        plan.compute.add_to(step)
        with tf.name_scope(PUSH_SCOPE):
            plan.push.add_to(step)
        outputs = step.outputs
        after = StepState(
            steps=state.steps + len(batches),
            metrics=outputs.metrics,
            rows=[before + self._rows_asked_for(step) for before in state.rows],
            logs=outputs.logs,
        )
        num_outputs = len(plan.outputs)
        predicted = [
            outputs.predicted[index * num_outputs : (index + 1) * num_outputs]
            for index in range(len(batches))
        ]
        return StepResult(after, predicted)

    def if_data(self, iterator: tf.data.Iterator, state: StepState, size: int) -> StepResult:
        """Add a step of `size` batches that runs if the iterator has so many left.

        If the iterator has fewer, each batch makes a step.
        """
        batches = [iterator.get_next_as_optional() for _ in range(size)]
        if size == 1:
            return self._if_value(batches[0], state)

        def one_by_one() -> StepResult:
            after, predicted = state, []
            for batch in batches:
                after, outputs = self._if_value(batch, after)
                predicted += outputs
            return StepResult(after, predicted)

        result: StepResult = tf.cond(
            batches[-1].has_value(),
            lambda: self([batch.get_value() for batch in batches], state),
            one_by_one,
        )
        return result

    def _if_value(self, batch: tf.experimental.Optional, state: StepState) -> StepResult:
        def skip() -> StepResult:
            nothing = [
                tf.zeros([] if s.shape.rank is None else [d or 0 for d in s.shape], s.dtype)
                for s in self.plan.outputs
            ]
            return StepResult(tf.nest.map_structure(tf.identity, state), [nothing])

        result: StepResult = tf.cond(
            batch.has_value(), lambda: self([batch.get_value()], state), skip
        )
        return result

    def while_data(
        self, iterator: tf.data.Iterator, state: StepState, sizes: list[int]
    ) -> StepState:
        """Return the state after the steps for which the iterator has batches.

        One check decides for all steps, since a decision takes a transfer to every task that a step
        asks. If the last batch exists, the steps run unrolled. Otherwise, once in an epoch, a loop
        runs the steps that have batches.

        Args:
            sizes: the number of batches that each step takes, the largest first.
        """
        batches = [iterator.get_next_as_optional() for _ in range(sum(sizes))]

        def all_steps() -> StepState:
            return self.in_turn([batch.get_value() for batch in batches], state, sizes).state

        def steps_left() -> StepState:
            batch_at = _indexed(batches, tf.OptionalSpec(iterator.element_spec))
            after = tf.constant(0), state
            for size in sorted({*sizes, 1}, reverse=True):
                after = self._while_batches(batch_at, len(batches), size, *after)
            return after[1]

        after: StepState = tf.cond(batches[-1].has_value(), all_steps, steps_left)
        return after

    def _while_batches(
        self,
        batch_at: Callable[[tf.Tensor], tf.experimental.Optional],
        num_batches: int,
        size: int,
        index: tf.Tensor,
        state: StepState,
    ) -> tuple[tf.Tensor, StepState]:
        """Return the index and the state after all steps that have `size` batches.

        The last of the `num_batches` batches does not exist.
        """

        def is_there(index: tf.Tensor, _: object) -> tf.Tensor:
            last = index if size == 1 else tf.minimum(index + size - 1, num_batches - 1)
            return batch_at(last).has_value()

        def step(index: tf.Tensor, state: StepState) -> Any:
            batches = [batch_at(index + i if i else index).get_value() for i in range(size)]
            return index + size, self(batches, state).state

        index, after = tf.while_loop(is_there, step, (index, state), parallel_iterations=1)
        return index, StepState(*after)

    def _start(
        self, state: StepState, index: int
    ) -> ByIdentity[ParameterServerVariable, tf.Tensor]:
        """Return the initial metric states and seeds of replica `index`."""
        plan = self.plan
        metrics = plan.state.specs.start(plan.joins).metrics if index else state.metrics
        start = ByIdentity(zip(plan.metrics, metrics, strict=True))
        steps = state.steps + index if index else state.steps
        start.update(zip(plan.seeds, self._seeds_at(steps), strict=True))
        return start

    def _seeds_at(self, steps: tf.Tensor) -> list[tf.Tensor]:
        """Return the states of the generators after `steps` batches of the execution."""
        return [
            tf.cast(tf.stack([seed, counter + steps * draws]), variable.storage.dtype)
            for variable, (seed, counter), draws in zip(
                self.plan.seeds, self._seeds, self.plan.draws, strict=True
            )
        ]

    def _lanes_at(self, steps: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return the lane for each ps after `steps` batches of the execution."""

        def are_applied() -> list[tf.Tensor]:
            size, done = self.plan.num_replicas, tf.cast(steps, tf.int32)
            if size > 1:  # batches that are left over are pushed one by one
                done = done // size + done % size
            return [done < applied for applied in self._ticket.applied]

        push = self.plan.push
        with tf.device("/device:CPU:0"):
            return push.rule.lanes(push.devices, self._ticket.lane, are_applied)

    def _rows_asked_for(self, step: StepContext) -> tf.Tensor:
        """Return the number of rows of each of `StepPlan.table_shards` that a step asks for."""
        requests = IdentitySet(step.requests.values())
        counts = [
            request.counts_in(shard) for request in requests for shard in request.group.shards
        ]
        return tf.cast(tf.concat(counts, 0), tf.int64)


def _indexed(
    batches: Sequence[tf.experimental.Optional], spec: tf.OptionalSpec
) -> Callable[[tf.Tensor], Any]:
    """Return a function that returns the batch at an index that is a tensor of the graph."""
    (variants,) = zip(
        *(tf.nest.flatten(batch, expand_composites=True) for batch in batches), strict=True
    )
    with tf.device("/device:CPU:0"):  # where the iterator is
        stacked = tf.stack(variants)

    def batch_at(index: tf.Tensor) -> Any:
        with tf.device("/device:CPU:0"):
            return tf.nest.pack_sequence_as(
                spec, [tf.gather(stacked, index)], expand_composites=True
            )

    return batch_at
