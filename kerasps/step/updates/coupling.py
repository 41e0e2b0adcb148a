"""Finds updates that couple the rows of a variable: by a norm, a mean over rows or a constraint.

A ps has some rows of a variable in shards, and a step has the touched rows of a table. Neither has
all rows that such an update needs. So a table is updated whole then, and a variable in shards is
refused.

The update is traced with a number of rows that is not known. Each of its operations must treat rows
one by one; an operation that is not known to do so counts as coupling them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from kerasps.errors import KeraspsError, UnsupportedError
from kerasps.step.records.identity import ByIdentity
from kerasps.step.updates.optimizers import is_elementwise, is_row_wise
from kerasps.step.updates.updating import Scalars, UpdatePhase, ValueOf, finish
from kerasps.variables import ParameterServerVariable, slots_of

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


class _RowsAreCoupled(Exception):
    """Ends the trace of an update that needs more than the rows that it has."""


class _UpdateOfRows(UpdatePhase):
    """The phase in which a variable and its slots are some of their rows.

    Args:
        rows: the rows of the variable, and of its slots of the same shape.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        scalars: Scalars,
        shared: list[ParameterServerVariable],
        variable: ParameterServerVariable,
        rows: ByIdentity[ParameterServerVariable, tf.Tensor],
    ) -> None:
        super().__init__(optimizer, scalars, shared)
        self.assigned: list[tf.Tensor] = []  # all values that the update assigns
        self._variable = variable
        self._rows = rows
        self._graph = tf.compat.v1.get_default_graph()

    def current(self, variable: ParameterServerVariable) -> tf.Tensor:
        """Return the current rows of `variable`."""
        if variable in self._rows:
            return self._rows[variable]
        if any(variable is slot for slot in _slots(self.optimizer, self._variable)):
            raise _RowsAreCoupled(f"it uses '{variable.path}', a slot of another shape")
        raise UnsupportedError(
            f"Optimizer {self.optimizer.name!r} uses another variable to update "
            f"'{self._variable.path}', which is in shards or read by rows. Expected: its own "
            f"slots, kept in lists parallel to the variables. Received: '{variable.path}'. Keep "
            "one slot per variable in a list, in the order of `build`'s argument."
        )

    def held(self, variable: ParameterServerVariable) -> ValueOf:
        self.current(variable)
        return ValueOf(self, variable)

    def assign_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.current(variable)
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise _RowsAreCoupled(f"it assigns '{variable.path}' in a condition or a loop")
        self._rows[variable] = value
        self.assigned.append(value)

    def add_to_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.assign_held(variable, self.current(variable) + value)

    def choose(
        self, condition: tf.Tensor, then: Callable[[], None], otherwise: Callable[[], None]
    ) -> None:
        # One after the other: what either assigns is looked at.
        otherwise()
        then()


def coupling_of(
    optimizer: keras.optimizers.Optimizer,
    variable: ParameterServerVariable,
    gradient_dtype: tf.DType,
    scalars: Scalars,
    shared: list[ParameterServerVariable],
) -> str | None:
    """Return how an update couples the rows of `variable`; None if it treats them one by one.

    Raises UnsupportedError if the update needs another variable.
    """
    slots = _slots(optimizer, variable)
    alike = [variable, *(slot for slot in slots if slot.storage.shape == variable.storage.shape)]

    def update(gradient: tf.Tensor, scalars: Scalars, rows: list[tf.Tensor]) -> list[tf.Tensor]:
        of_each = ByIdentity(zip(alike, rows, strict=True))
        phase = _UpdateOfRows(optimizer, scalars, shared, variable, of_each)
        finish(phase, variable, gradient, scalars.clip_scale)
        return phase.assigned

    def some_rows(dtype: tf.DType) -> tf.TensorSpec:
        return tf.TensorSpec([None, *variable.storage.shape[1:]], dtype)

    try:
        function = tf.function(update, autograph=False).get_concrete_function(
            some_rows(gradient_dtype), scalars, [some_rows(v.storage.dtype) for v in alike]
        )
    except _RowsAreCoupled as exc:
        return str(exc)
    except KeraspsError:
        raise
    except Exception as exc:  # of an optimizer that wants a number for the rows
        return f"it needs to know the number of rows ({type(exc).__name__}: {exc})"
    arguments = function.inputs[: len(function.inputs) - len(function.captured_inputs)]
    return _coupling_in(function.outputs, {tensor.op.name for tensor in arguments})


def _coupling_in(results: Sequence[tf.Tensor], arguments: set[str]) -> str | None:
    """Return how operations couple rows on the way from the arguments, by name, to the results."""
    pending, seen = [result.op for result in results], set(arguments)
    while pending:
        operation = pending.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            if not _treats_rows_alone(operation):
                return f"the operation {operation.type} is not known to treat rows one by one"
            pending += [operand.op for operand in operation.inputs]
    return None


def _treats_rows_alone(operation: tf.Operation) -> bool:
    """Return True if each row of the result follows from that row of the operands.

    Also if neither has rows, and each ps computes the same.
    """
    if operation.op_def is None or operation.op_def.is_stateful:
        return False
    with_rows = [operand for operand in operation.inputs if _has_rows(operand)]
    if not with_rows or not all(_has_rows(result) for result in operation.outputs):
        return not with_rows and not any(_has_rows(result) for result in operation.outputs)
    rank = operation.outputs[0].shape.rank
    if operation.type in ELEMENTWISE:
        # If an operand has fewer axes, its first axis is not the first of the result.
        return rank is not None and all(operand.shape.rank == rank for operand in with_rows)
    if operation.type in _REDUCTIONS or operation.type == "ExpandDims":
        axes = tf.get_static_value(operation.inputs[1])
        rank = rank if operation.type == "ExpandDims" else operation.inputs[0].shape.rank
        return axes is not None and all(int(axis) % rank != 0 for axis in axes.reshape(-1))
    return False


def _has_rows(tensor: tf.Tensor) -> bool:
    """Return True if the size of the first axis is not known, as the number of rows is not."""
    return tensor.shape.rank is None or (tensor.shape.rank > 0 and tensor.shape[0] is None)


def _slots(
    optimizer: keras.optimizers.Optimizer, variable: ParameterServerVariable
) -> list[ParameterServerVariable]:
    slots = slots_of(optimizer)[optimizer._get_variable_index(variable)]
    return [slot for slot in slots if isinstance(slot, ParameterServerVariable)]


def refusal(
    optimizer: keras.optimizers.Optimizer, variable: ParameterServerVariable, how: str
) -> UnsupportedError:
    """Return the error of an update that couples rows of a variable in shards, as `how` tells."""
    if not is_elementwise(optimizer):
        what = f"The update of optimizer {optimizer.name!r}"
        instead = "another optimizer, such as Adam or Adagrad"
    elif not is_row_wise(variable):
        what = f"The constraint {type(variable.constraint).__name__}"
        instead = "a constraint of each row, such as `MaxNorm(axis=1)`"
    else:
        what = f"Optimizer {optimizer.name!r} with `clipnorm` and `gradient_accumulation_steps`"
        instead = "`global_clipnorm` or `clipvalue`"
    return UnsupportedError(
        f"{what} couples the rows of '{variable.path}', which is in "
        f"{len(variable.shards)} shards, and no ps has all rows. Expected: an update of each row "
        f"by that row, its gradient and its slots alone. Received: {how}. Keep such variables "
        f"whole, with a larger minimum of the `variable_partitioner` or without one, or take "
        f"{instead}."
    )
