"""Keeps the arithmetic on scalars off a GPU: counters, seeds, learning rates, loss scales.

They begin on the worker's CPU, and most end there: a counter is pushed, a seed is read by the
kernel that draws from it. On a GPU each would be copied there and back, and the copy back waits for
all pending work of the GPU. So operations on such scalars alone are placed on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from kerasps.cluster.description.worker_devices import FIRST_CPU

# A seed is two numbers; vectors of a few scalars are no work for a GPU either.
_MAX_ELEMENTS = 16


def place_scalars(graph: tf.Graph, inputs: Iterable[tf.Tensor], devices: Sequence[str]) -> None:
    """Place operations on scalars alone on the CPU. Call at the end of a trace, in its graph.

    Args:
        inputs: the inputs of the graph that are on the CPU, such as pulled values; only small ones
            count.
        devices: the devices that compute. Operations on other devices stay where the user put them.
    """
    scalars = {id(tensor) for tensor in inputs if _is_small(tensor)}
    constants: set[int] = set()  # tensors that depend on no input
    known = {"", *(f"/device:{device}" for device in devices)}
    for operation in graph.get_operations():
        given = [tensor for tensor in operation.inputs if id(tensor) not in constants]
        is_plain = operation.device in known and not _does_more(operation)
        if not is_plain or not all(_is_small(tensor) for tensor in operation.outputs):
            continue
        if operation.type == "Placeholder" or any(id(tensor) not in scalars for tensor in given):
            continue
        outputs = [id(tensor) for tensor in operation.outputs]
        if given:
            _place(operation, constants)
            scalars.update(outputs)
        else:
            constants.update(outputs)


def _place(operation: tf.Operation, constants: set[int]) -> None:
    """Place an operation on the CPU, with the constants that it works on."""
    operation._set_device(f"/device:{FIRST_CPU}")
    for tensor in operation.inputs:
        if id(tensor) in constants:
            _place(tensor.op, constants)


def _is_small(tensor: tf.Tensor) -> bool:
    is_number = tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
    size = tensor.shape.num_elements()
    return is_number and size is not None and size <= _MAX_ELEMENTS


def _does_more(operation: tf.Operation) -> bool:
    """Return True if an operation calls functions or has an effect."""
    definition = operation.op_def
    calls = any(attribute.type in ("func", "list(func)") for attribute in definition.attr)
    return calls or definition.is_stateful or not operation.outputs
