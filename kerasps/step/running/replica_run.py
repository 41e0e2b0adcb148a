"""`strategy.run` in a function of a custom loop: turns the function that it receives into a step.

The step is the same as in `fit`: pull, compute, push. `fit` builds a graph around its steps. Here
the user's `tf.function` is the graph, and the operations of the step are added where the user calls
`strategy.run`. A call also needs what `fit` sends with an execution. The lane of the worker comes
with the call (`CallTicket`). Seeds come from a ps, which also adds up metrics
(`variables.StandIns`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.description.worker_devices import FIRST_CPU
from kerasps.errors import UnsupportedError
from kerasps.runtime.devices import ps_index
from kerasps.step.compute.methods import Method
from kerasps.step.compute.returned import Returned
from kerasps.step.contract.host import StepHost
from kerasps.step.phases.step_context import ReplicaInputs, StepContext
from kerasps.step.records.identity import ByIdentity
from kerasps.step.records.specs import spec_of
from kerasps.step.tracing.plan import StepPlan
from kerasps.step.tracing.surroundings import CallSurroundings
from kerasps.step.tracing.tracer import Tracer
from kerasps.variables import LookupTables, ParameterServerVariable, anonymous_handle, current_phase


class CallTicket(NamedTuple):
    """The ticket that the pushes of one call carry; holds numbers, or tensors of them."""

    lane: Any  # the lane in which the worker pushes (see `variables.Fences`)
    number: Any  # the number of the call in that lane
    # For each ps of the cluster, how many of the call's first pushes it has applied before, for a
    # worker that was lost.
    applied: Sequence[Any]

    @staticmethod
    def spec() -> tf.TensorSpec:
        """Return the spec of a ticket as it is sent: one element, for which no call waits."""
        return tf.TensorSpec([], tf.string)

    def to_bytes(self) -> bytes:
        """Return the ticket as the coordinator sends it: int32 numbers."""
        return np.array([self.lane, self.number, *self.applied], "<i4").tobytes()

    @classmethod
    def from_tensor(cls, tensor: tf.Tensor, num_ps: int) -> CallTicket:
        """Return the ticket that `to_bytes` packed, as scalars in a graph."""
        lane, number, *applied = tf.unstack(tf.io.decode_raw(tensor, tf.int32), 2 + num_ps)
        return cls(lane, number, applied)


class Calls(Protocol):
    """Keeps a record of the function that this thread traces or calls."""

    @property
    def redone(self) -> PushCounts | None:
        """The push counts, if the function is traced to redo partly applied calls; else None."""

    def device(self) -> tuple[str, bool]:
        """Return the device that computes the function, and whether all workers have it."""

    def note_push(self, graph: tf.Graph, devices: Sequence[str]) -> None:
        """Note that each call of the function with this graph pushes once to each of `devices`."""

    def lane(self, tables: LookupTables) -> tf.Tensor:
        """Return a variable with the lane of the worker, for the call that this thread makes.

        It is on the worker, and holds an int32 scalar. Makes the worker ready.
        """

    def ticket(self, tables: LookupTables) -> tf.Tensor:
        """Return the packed ticket of the call that this thread makes; make its worker ready."""


class PushCounts:
    """The number of pushes that a call has sent each ps, in the graph of a repeated call."""

    def __init__(self, num_ps: int) -> None:
        self._num_ps = num_ps
        self._handle: tf.Tensor | None = None

    def next(self, graph: tf.Graph, devices: Sequence[str]) -> list[tf.Tensor]:
        """Return the counts of all ps, then add one to those of `devices`."""
        if self._handle is None:
            # In the function's graph, where no condition or loop hides it from later runs.
            with graph.as_default(), tf.device("/device:CPU:0"):
                self._handle = anonymous_handle(tf.TensorShape([self._num_ps]), tf.int32)
                zeros = tf.zeros([self._num_ps], tf.int32)
                tf.raw_ops.AssignVariableOp(resource=self._handle, value=zeros)
        sent = {ps_index(device) for device in devices}
        with tf.device("/device:CPU:0"):
            counts = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int32)
            counts.set_shape([self._num_ps])
            with tf.control_dependencies([counts]):
                ones = tf.constant([int(ps in sent) for ps in range(self._num_ps)])
                tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=ones)
            return list(tf.unstack(counts))


def run_in_graph(
    host: StepHost,
    calls: Calls,
    fn: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
) -> Any:
    """Add a step to the `tf.function` that is being traced; return what `fn` returns."""
    wanted = host.options.worker_devices
    if wanted is not None and len(wanted) > 1:
        raise UnsupportedError(
            "A function of a custom loop computes on one device of its worker. Expected: at most "
            f"one of `worker_devices`. Received: worker_devices={list(wanted)!r}. "
            "Train with `model.fit`, which uses several; or leave the argument out, or name one."
        )
    graph, redone = function_graph(), calls.redone
    # The number of pushes per call is known if no condition, loop or other function can repeat or
    # skip the step. Then the worker keeps the lane, and the coordinator sends it nothing per call.
    is_counted = redone is None and graph is tf.compat.v1.get_default_graph() and _is_whole(graph)
    method = ReplicaFunction(fn, args, kwargs or {})
    device, is_everywhere = calls.device()
    has_gpu = is_everywhere and device.startswith("GPU:")
    surroundings = CallSurroundings(host, numbers_calls=not is_counted)
    tracer = Tracer(method, surroundings, host, method.specs, fused=False)
    plan = tracer.trace(device, has_gpu=has_gpu).plan
    if is_counted:
        calls.note_push(graph, plan.push.devices)
        handle = graph.capture_call_time_value(
            lambda: calls.lane(plan.lookup_tables), tf.TensorSpec([], tf.resource)
        )
        with tf.device("/device:CPU:0"):
            lane = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32)
            lane.set_shape([])
        lanes = dict.fromkeys(plan.push.devices, lane)
        return method.result(_add_step(plan, method.batch, lanes, None))
    if redone is not None:
        plan = plan.redoing
    with graph.as_default(), tf.device("/device:CPU:0"):
        packed = graph.capture_call_time_value(
            lambda: calls.ticket(plan.lookup_tables), CallTicket.spec()
        )
        ticket = CallTicket.from_tensor(packed, host.num_ps)
    devices = plan.push.devices

    def are_applied() -> list[tf.Tensor]:
        assert redone is not None  # other rules do not call this
        sent = redone.next(graph, devices)
        return [sent[ps] < ticket.applied[ps] for ps in map(ps_index, devices)]

    with tf.device("/device:CPU:0"):
        lanes = plan.push.rule.lanes(devices, ticket.lane, are_applied)
    return method.result(_add_step(plan, method.batch, lanes, ticket.number))


def _add_step(
    plan: StepPlan, batch: object, lanes: Mapping[str, tf.Tensor], number: tf.Tensor | None
) -> list[tf.Tensor]:
    """Add the operations of a step to the current graph; return its predictions."""
    with tf.device(f"/device:{FIRST_CPU}"):  # except the compute phase
        return _step_outputs(plan, batch, lanes, number)


def _step_outputs(
    plan: StepPlan, batch: object, lanes: Mapping[str, tf.Tensor], number: tf.Tensor | None
) -> list[tf.Tensor]:
    handles = plan.find_handles()
    handles.update(plan.lookup_tables.handles())
    scratch = {
        key: anonymous_handle(spec.shape, spec.dtype)
        for key, spec in plan.inventory.scratch.items()
    }
    start: ByIdentity[ParameterServerVariable, tf.Tensor] = ByIdentity(
        (v, join.start(spec_of(v))) for v, join in zip(plan.metrics, plan.joins, strict=True)
    )
    if plan.draw is not None:
        start.update(zip(plan.seeds, plan.draw.add_to(handles), strict=True))
    replica = ReplicaInputs(scratch, plan.names[0], batch, start)
    step = StepContext(handles, [replica], lanes, number, device=plan.converts_on)
    for phase in plan.phases:
        phase.add_to(step)
    return step.outputs.predicted


def function_graph() -> Any:
    """Return the graph of the `tf.function` that is being traced.

    The current graph may be that of a condition or a loop inside it.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    of_control_flow = (
        _compat.CondBranchFuncGraph,
        _compat.WhileCondFuncGraph,
        _compat.WhileBodyFuncGraph,
    )
    while isinstance(graph, of_control_flow):
        graph = graph.outer_graph
    return graph


def _is_whole(graph: tf.Graph) -> bool:
    """Return True if no other function calls the function of this graph."""
    return not isinstance(graph.outer_graph, tf.__internal__.FuncGraph)


class ReplicaFunction(Method):
    """A function that `strategy.run` received, and its arguments (see `Method`)."""

    name = "The function given to `strategy.run`"

    def __init__(
        self,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> None:
        self._fn = fn
        self._given = tuple(args), dict(kwargs)
        self._graph = tf.compat.v1.get_default_graph()
        self._iterators: ByIdentity[Any, HoistedIterator] = ByIdentity()
        # The tensors among the arguments.
        self.batch = [leaf for leaf in tf.nest.flatten(self._given) if _is_tensor(leaf)]
        self._result: Any = None

    @property
    def specs(self) -> list[tf.TypeSpec]:
        """The specs of the batch."""
        return [tf.type_spec_from_value(tensor) for tensor in self.batch]

    def call(self, batch: Any) -> Returned:
        """Call the function with the tensors of `batch` in place of those it was given."""
        tensors = iter(batch)

        def argument(given: object) -> Any:
            if _is_tensor(given):
                return next(tensors)
            if isinstance(given, tf.data.Iterator) or hasattr(given, "get_next_as_optional"):
                if given not in self._iterators:
                    self._iterators[given] = HoistedIterator(given, self._graph)
                self._iterators[given].begin()
                return self._iterators[given]
            return given

        args, kwargs = tf.nest.map_structure(argument, self._given)
        self._result = tf.nest.map_structure(_read, self._fn(*args, **kwargs))
        leaves = tf.nest.flatten(self._result, expand_composites=True)
        return Returned(predicted=[leaf for leaf in leaves if tf.is_tensor(leaf)])

    def result(self, predicted: Sequence[tf.Tensor]) -> Any:
        """Return the function's result, with the tensors of a step in it."""
        tensors = iter(predicted)
        leaves = tf.nest.flatten(self._result, expand_composites=True)
        return tf.nest.pack_sequence_as(
            self._result,
            [next(tensors) if tf.is_tensor(leaf) else leaf for leaf in leaves],
            expand_composites=True,
        )


class HoistedIterator:
    """Replaces an iterator among a step's arguments; it reads batches ahead of the step.

    A step is traced several times, and its ids are worked out ahead of it, but each batch is read
    only once.
    """

    def __init__(self, iterator: tf.data.Iterator, graph: tf.Graph) -> None:
        self._iterator = iterator
        self._graph = graph
        self._read: list[Any] = []
        self._next = 0

    def begin(self) -> None:
        """Begin another trace, which gets the same batches again."""
        self._next = 0

    @property
    def element_spec(self) -> Any:
        """The spec of a batch."""
        return self._iterator.element_spec

    def __iter__(self) -> Any:
        raise UnsupportedError(
            "The function given to `strategy.run` loops over an iterator. Expected: one batch, or "
            "a known number of them: `next(iterator)`. Received: `for ... in iterator`. Put the "
            "loop around `strategy.run`, with `next(iterator)` among its arguments."
        )

    def __next__(self) -> Any:
        return self.get_next()

    def get_next(self) -> Any:
        """Return the next batch."""
        return self._hoisted(lambda: self._iterator.get_next())

    def get_next_as_optional(self) -> Any:
        """Return the next batch as a `tf.experimental.Optional`."""
        return self._hoisted(lambda: self._iterator.get_next_as_optional())

    def _hoisted(self, read: Callable[[], object]) -> Any:
        phase: Any = current_phase()
        if phase is not None and phase.values.in_control_flow():
            return read()  # the branch or loop may not run, so the batch must not be read ahead
        if self._next == len(self._read):
            with self._graph.as_default():
                self._read.append(read())
        self._next += 1
        return self._read[self._next - 1]


def _is_tensor(value: object) -> bool:
    is_composite = isinstance(value, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices))
    return is_composite or (isinstance(value, tf.Tensor) and value.dtype != tf.resource)


def _read(value: object) -> Any:
    """Return the value of a variable that a function returns; return other objects unchanged."""
    is_variable = isinstance(value, (tf.Variable, keras.Variable))
    return tf.convert_to_tensor(value) if is_variable else value
