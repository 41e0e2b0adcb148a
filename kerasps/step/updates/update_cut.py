"""The cut through the graph of an update: one part for each ps, and one for the worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.step.records.packing import leaves_of
from kerasps.step.updates.traced_update import CHANCE, TracedUpdate, has_effects
from kerasps.variables import ParameterServerVariable

# Operations whose result at each place depends only on their operands at that place.
_ELEMENTWISE_NAMES = """
    Abs Acos Acosh Add AddV2 Asin Asinh Atan Atan2 Atanh BitwiseAnd BitwiseOr BitwiseXor Cast
    Ceil Cos Cosh Digamma Div DivNoNan Elu Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv
    FloorMod Greater GreaterEqual Identity Inv Invert IsFinite IsInf IsNan LeakyRelu Less
    LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan
    Ndtri Neg NextAfter NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Relu6 Rint
    Round Rsqrt SelectV2 Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square
    SquaredDifference StopGradient Sub Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy
    ZerosLike
"""
ELEMENTWISE = frozenset(_ELEMENTWISE_NAMES.split())
_REDUCTIONS = frozenset(["All", "Any", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum"])


@dataclass(frozen=True)
class Result:
    """The new value of a variable or slot, or, if `adds`, the addition to it.

    `tensor` is its name in the traced graph.
    """

    variable: ParameterServerVariable
    tensor: str
    adds: bool = False


@dataclass(frozen=True)
class Cut:
    """The part of a cut update that one ps computes.

    Args:
        results: the results that it computes.
        sent: the tensors that the worker sends it.
        stored: the variables of which it holds a shard.
        constants: constants of the whole variable, of which it uses its rows.
    """

    results: list[Result]
    sent: dict[str, tf.Tensor]
    stored: dict[str, ParameterServerVariable]
    constants: list[tf.Tensor]


def is_sliced(traced: TracedUpdate, tensor: tf.Tensor | tf.TensorSpec) -> bool:
    """Return True if a ps has, of a tensor in the traced graph, only the entries of its rows.

    It has all of any other tensor.
    """
    return bool(tensor.shape.rank and tensor.shape[0] == traced.variable.storage.shape[0])


def cut_rows(traced: TracedUpdate) -> Cut:
    """Return the part for the ps of each shard: its rows of the variable and of slots like it."""
    plan = _RowPlan(traced)
    results: list[Result] = []
    targets: list[tf.Tensor] = []
    for variable in plan.stored.values():
        if variable in traced.new:
            new = traced.new[variable]
            # If the worker computes the whole new value, assigning it would undo pushes of other
            # workers since the pull.
            adds = variable is traced.variable and new.name in plan.sent(new)
            targets.append(traced.difference if adds else new)
            results.append(Result(variable, targets[-1].name, adds))
    sent = {name: tensor for target in targets for name, tensor in plan.sent(target).items()}
    constants, stored = plan.used(targets)
    return _checked(
        traced, Cut(results, sent, {name: plan.stored[name] for name in stored}, constants)
    )


def cut_other_slots(traced: TracedUpdate) -> Cut:
    """Return the part for the ps of the first shard, which updates slots of other shapes.

    It has all operations that depend on them.
    """
    stored = traced.inputs_of(rowed=False)
    changed = [v for v in stored.values() if v in traced.new]
    free = set(leaves_of(traced.scalars))
    sent: dict[str, tf.Tensor] = {}
    pending, seen = [traced.new[v] for v in changed], set()
    while pending:
        tensor = pending.pop()
        sources = traced.sources[tensor.name]
        if tensor.name in seen or sources <= free or tensor.name in stored:
            continue
        seen.add(tensor.name)
        if sources & set(stored) and CHANCE not in sources:
            pending += tensor.op.inputs
        else:
            sent[tensor.name] = tensor
    results = [Result(v, traced.new[v].name) for v in changed]
    return _checked(traced, Cut(results, sent, stored if changed else {}, []))


def _checked(traced: TracedUpdate, cut: Cut) -> Cut:
    for tensor in cut.sent.values():
        if not tensor.shape.is_fully_defined() or tensor.dtype in (
            tf.string,
            tf.resource,
            tf.variant,
        ):
            raise UnsupportedError(
                f"The update of '{traced.variable.path}', which is in shards, couples its rows by "
                "a value that cannot be sent to a ps. Expected: numbers, of a shape that is "
                f"known. Received: {tensor.dtype.name} of shape {tensor.shape}, from "
                f"{tensor.op.type}. Leave the variable whole, with a partitioner's `min_bytes` or "
                "`min_shard_bytes`."
            )
    return cut


class _RowPlan:
    """Finds the tensors that a ps can compute from some rows, and those it must be sent."""

    def __init__(self, traced: TracedUpdate) -> None:
        self.stored = traced.inputs_of(rowed=True)
        self._traced = traced
        self._sources = traced.sources
        self._free = {traced.gradient, *leaves_of(traced.scalars)}
        self._plans: dict[str, tuple[dict[str, tf.Tensor], bool]] = {}

    def sent(self, tensor: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return the tensors to send so that a ps has `tensor`: itself, or tensors before it."""
        return self._plan(tensor)[0]

    def used(self, targets: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], set[str]]:
        """Return the sliced constants and the names of stored inputs on which `targets` depend."""
        constants: list[tf.Tensor] = []
        stored: set[str] = set()
        pending, seen = list(targets), set()
        while pending:
            tensor = pending.pop()
            name = tensor.name
            if name in seen or name in self._free or name in self.sent(tensor):
                continue
            seen.add(name)
            if name in self.stored:
                stored.add(name)
            elif self._sources[name]:
                pending += tensor.op.inputs
            elif self._is_sliced(tensor):
                constants.append(tensor)
        return constants, stored

    def _plan(self, tensor: tf.Tensor) -> tuple[dict[str, tf.Tensor], bool]:
        """Return the tensors to send, and whether the result depends on values stored on a ps."""
        if tensor.name not in self._plans:
            self._plans[tensor.name] = self._make_plan(tensor)
        return self._plans[tensor.name]

    def _make_plan(self, tensor: tf.Tensor) -> tuple[dict[str, tf.Tensor], bool]:
        name = tensor.name
        if name in self._free or name in self.stored or not self._sources[name]:
            return {}, name in self.stored
        if not self._has_operands(tensor.op):
            return {name: tensor}, False
        plans = [self._plan(operand) for operand in tensor.op.inputs]
        sent = {key: value for of_operand, _ in plans for key, value in of_operand.items()}
        is_fresh = any(fresh for _, fresh in plans)
        # The worker's result is equivalent, and is sent instead if it is smaller than its operands.
        if sent and not is_fresh and _num_bytes([tensor]) <= _num_bytes(sent.values()):
            return {name: tensor}, False
        return sent, is_fresh

    def _is_sliced(self, tensor: tf.Tensor) -> bool:
        return is_sliced(self._traced, tensor)

    def _has_operands(self, operation: tf.Operation) -> bool:
        """Return True if a ps can run `operation` on the operands that it has.

        It runs the operation on its rows, or on whole tensors.
        """
        if operation.type == "Placeholder" or has_effects(operation):
            return False
        sliced = [self._is_sliced(operand) for operand in operation.inputs]
        if not any(self._is_sliced(result) for result in operation.outputs):
            return not any(sliced)
        if len(operation.outputs) > 1 or not any(sliced):
            return False
        rank = operation.outputs[0].shape.rank
        if operation.type in ELEMENTWISE:
            # If an operand has fewer axes, its first axis is not the first of the result.
            return all(
                operand.shape.rank == rank
                for operand, has in zip(operation.inputs, sliced, strict=True)
                if has
            )
        if operation.type in _REDUCTIONS or operation.type == "ExpandDims":
            axes = tf.get_static_value(operation.inputs[1])
            if axes is None or sliced[1]:
                return False
            rank = rank if operation.type == "ExpandDims" else operation.inputs[0].shape.rank
            return all(int(axis) % rank != 0 for axis in axes.reshape(-1))
        return False


def is_uniform(constant: tf.Tensor) -> bool:
    """Return True if all elements of a constant are known to be the same."""
    if constant.op.type == "Fill":
        return True
    value = tf.get_static_value(constant) if constant.op.type == "Const" else None
    return value is not None and bool((value == value.flat[0]).all())


def _num_bytes(tensors: Iterable[tf.Tensor]) -> int:
    return sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors)
