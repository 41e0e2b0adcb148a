"""The variables on whose values the tensors of a step depend."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import tensorflow as tf

# A variable's `id`, or the key of its scratch resource, and a number: the point of the step.
Owner = tuple[Hashable, int]

# Their results depend on the shape and the dtype of their input alone.
_OF_SHAPES = frozenset(["OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"])


class Dependence(NamedTuple):
    """The variables on which a tensor depends, as bits (see `Sources.bit`)."""

    any: int = 0  # those on whose values it depends
    by_condition: int = 0  # those of them on which it depends through a bool, such as a comparison

    def and_also(self, other: Dependence) -> Dependence:
        """Return the dependence of a tensor that is computed from two others."""
        return Dependence(self.any | other.any, self.by_condition | other.by_condition)


class Sources:
    """Tells on which variables' values the tensors of a graph, and of graphs inside it, depend."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], Dependence] = {}
        self._captures: dict[int, tuple[int, dict[str, Any]]] = {}
        self._bits: dict[Owner, int] = {}
        self._values: dict[Owner, list[tf.Tensor]] = {}

    def bit(self, owner: Owner) -> int:
        """Return the bit of an owner of values: a variable at some point of the step."""
        return self._bits.setdefault(owner, 1 << len(self._bits))

    def mask(self, variables: set[int]) -> int:
        """Return the bits of all owners that are these variables, given their `id`s."""
        return sum(
            bit
            for (of, _), bit in self._bits.items()
            if of in variables or getattr(of, "owner", None) in variables
        )

    def add(self, tensor: tf.Tensor, owner: Owner) -> None:
        """Note that a tensor is the value of an owner.

        Call before any other tensor that depends on it is asked for.
        """
        bit = self.bit(owner)
        self._values.setdefault(owner, []).append(tensor)
        self._found[_key(tensor.op)] = Dependence(bit, bit if tensor.dtype.is_bool else 0)

    def is_value_of(self, tensor: tf.Tensor, owner: Owner) -> bool:
        """Return True if a tensor is the value of an owner."""
        return any(tensor is value for value in self._values.get(owner, ()))

    def value_of(self, owner: Owner) -> tf.Tensor:
        """Return the value of an owner that was added last."""
        return self._values[owner][-1]

    def of(self, tensor: tf.Tensor) -> Dependence:
        """Return the variables on which a tensor depends."""
        if not is_symbolic(tensor):
            return Dependence()
        pending = [tensor.op]
        while pending:
            operation = pending[-1]
            key = _key(operation)
            if key in self._found:
                pending.pop()
                continue
            inputs = self._inputs(operation)
            missing = [op for op in inputs if _key(op) not in self._found]
            if missing:
                pending += missing
                continue
            dependence = Dependence()
            for op in inputs:
                dependence = dependence.and_also(self._found[_key(op)])
            if any(output.dtype.is_bool for output in operation.outputs):
                dependence = Dependence(dependence.any, dependence.any)
            self._found[key] = dependence
            pending.pop()
        return self._found[_key(tensor.op)]

    def captured(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Return the tensor of a graph around it that a placeholder stands for; None for others."""
        graph = tensor.graph
        captures = getattr(graph, "captures", None)
        if tensor.op.type != "Placeholder" or captures is None:
            return None
        number, known = self._captures.get(id(graph), (-1, {}))
        if number != len(captures):  # a graph that is being traced may capture more
            known = {inner.op.name: outer for outer, inner in captures}
            self._captures[id(graph)] = len(captures), known
        outer = known.get(tensor.op.name)
        return outer if is_symbolic(outer) else None

    def _inputs(self, operation: tf.Operation) -> list[tf.Operation]:
        if operation.type in _OF_SHAPES:
            return []
        if operation.type == "Placeholder":
            outer = self.captured(operation.outputs[0])
            return [] if outer is None else [outer.op]
        return [tensor.op for tensor in operation.inputs]


def is_symbolic(tensor: object) -> bool:
    """Return True for a tensor of a graph; it has no value yet."""
    return isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy")


def _key(operation: tf.Operation) -> tuple[int, str]:
    return id(operation.graph), operation.name
