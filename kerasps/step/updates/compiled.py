"""The updates of large values, compiled by XLA: fewer passes over the values and their slots.

Keras's `update_step` is a series of operations, each of which reads and writes all values: twelve
for Adam. XLA makes a loop for each value or slot that changes: three for Adam. The results differ
in the last bits, since XLA may round once where the operations round twice.

Only updates of elementwise operations are compiled, for which XLA has code in any optimizer. Other
updates run operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kerasps.step.updates.coupling import ELEMENTWISE
from kerasps.step.updates.optimizers import has_uniform_updates
from kerasps.step.updates.updating import UpdatePhase
from kerasps.variables import ParameterServerVariable, call_with, slots_of

# Compiling pays for larger values: at half a MiB, an update by Adam takes half the time. XLA takes
# 50 ms to compile an update.
COMPILED_BYTES = 2**18
# XLA may omit conversions to dtypes of fewer bits, and with them the rounding.
_DTYPES = (tf.float32, tf.float64)
_OTHERS = """
    AssignAddVariableOp AssignSubVariableOp AssignVariableOp BroadcastTo Const Fill NoOp
    Placeholder ReadVariableOp
"""
_COMPILES = ELEMENTWISE.union(_OTHERS.split())

_MakeUpdate = Callable[[ParameterServerVariable, tf.Tensor], None]


@dataclass(frozen=True)
class _Compiled:
    """A compiled update."""

    # Runs the update, given the gradient as it was sent.
    function: tf.types.experimental.ConcreteFunction
    captures: Sequence[tf.Tensor]  # the tensors that the function captured
    held: Sequence[tf.Variable]  # the storages of the values and the slots that it was traced with


class CompiledUpdates:
    """The compiled updates of an optimizer's variables on one ps.

    Variables of one shape share a function if their updates are the same.
    """

    def __init__(self, phase: UpdatePhase) -> None:
        self._phase = phase
        self._compiled: dict[Any, _Compiled | None] = {}

    def update(
        self, variable: ParameterServerVariable, gradient: tf.Tensor, make_update: _MakeUpdate
    ) -> bool:
        """Update a variable, if compiling pays. Call while the phase is entered.

        Returns True if it updated the variable.
        """
        optimizer = self._phase.optimizer
        slots = slots_of(optimizer)[optimizer._get_variable_index(variable)]
        held = [
            self._phase.held(one)
            for one in (variable, *slots)
            if isinstance(one, ParameterServerVariable)
        ]
        if not _is_worth_it(held, gradient):
            return False
        sent = _as_sent(gradient)
        key = self._key(variable, held, sent)
        if key not in self._compiled:
            self._compiled[key] = _traced(make_update, variable, sent, held)
        compiled = self._compiled[key]
        if compiled is None:
            return False
        handles = {
            id(traced.handle): other.handle
            for traced, other in zip(compiled.held, held, strict=True)
        }
        call_with(handles, compiled.function, compiled.captures, sent)
        return True

    def _key(
        self, variable: ParameterServerVariable, held: Sequence[tf.Variable], sent: tf.Tensor
    ) -> Any:
        """Return a key that is equal for variables whose updates can share a function."""
        optimizer: keras.optimizers.Optimizer = self._phase.optimizer
        decays = optimizer.weight_decay is not None and bool(optimizer._use_weight_decay(variable))
        specs = tuple((tuple(one.shape), one.dtype) for one in held)
        # The captures of a function belong to the graph in which it was traced.
        graph = tf.compat.v1.get_default_graph()
        alone = None if has_uniform_updates(optimizer) else id(variable)
        return id(graph), specs, sent.dtype, decays, alone


def _is_worth_it(held: Sequence[Any], gradient: tf.Tensor) -> bool:
    """Return True if values are large, whole, on a CPU, and of dtypes that XLA keeps."""
    if not all(isinstance(one, tf.Variable) for one in held):
        return False  # rows of a table
    values = held[0]
    dtypes = {one.dtype for one in held} | {gradient.dtype}
    num_bytes = values.shape.num_elements() * values.dtype.size
    is_on_cpu = tf.DeviceSpec.from_string(values.device).device_type == "CPU"
    return num_bytes > COMPILED_BYTES and dtypes <= {*_DTYPES} and is_on_cpu


def _as_sent(gradient: tf.Tensor) -> tf.Tensor:
    """Return a gradient in the dtype in which it was sent, for the update to convert it.

    The result is the same, and it saves a pass.
    """
    if gradient.op.type == "Cast" and gradient.op.inputs[0].dtype in (tf.bfloat16, tf.float16):
        return gradient.op.inputs[0]
    return gradient


def _traced(
    make_update: _MakeUpdate,
    variable: ParameterServerVariable,
    sent: tf.Tensor,
    held: Sequence[tf.Variable],
) -> _Compiled | None:
    """Trace an update; return None if it has operations that may not be compiled.

    Args:
        sent: the gradient, in the dtype in which it was sent.
    """

    def update(sent: tf.Tensor) -> None:
        make_update(variable, tf.cast(sent, held[0].dtype))

    function = tf.function(update, autograph=False, jit_compile=True).get_concrete_function(
        tf.TensorSpec(sent.shape, sent.dtype)
    )
    types = {operation.type for operation in function.graph.get_operations()}
    if not types <= _COMPILES:
        return None
    return _Compiled(function, list(function.captured_inputs), held)
