"""Finds, in the graph of a step, the function by which a new value follows from the old one.

It walks from the new value back to the old one. Each operation on the way turns the forms of its
inputs into that of its output (`forms.py`). An operation for which there is no rule gives a value
of which nothing more is known: it replaces the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.step.changes.forms import SOME, Form, negated, reciprocal
from kerasps.step.changes.sources import Owner, Sources
from kerasps.step.contract.change import Change, Field, is_number, largest_of, least_of

_Rule = Callable[["_Walk", tf.Operation, tf.Tensor], Form | None]


def find_form(sources: Sources, owner: Owner, new: tf.Tensor) -> Form:
    """Return the form of a new value. Call in the graph in which the form is used."""
    form = _Walk(sources, owner).of(new)
    if form is None or (is_number(form.change.scale) and form.change.scale == 0):
        return Form.of_value(_constant(new, new), is_exact=form is None or form.is_exact)
    return form


def conditions_around(graph: tf.Graph, handles: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the conditions of all branches in a graph that may use some of the tensors."""
    names = {handle.name for handle in handles}
    found = []
    for operation in graph.get_operations():
        if operation.type not in ("If", "StatelessIf"):
            continue
        places = [i for i, tensor in enumerate(operation.inputs[1:]) if tensor.name in names]
        if places:
            found.append(operation.inputs[0])
            for branch in _compat.get_func_graphs(operation):
                found += conditions_around(branch, [branch.inputs[i] for i in places])
    return found


class _Walk:
    """The walk from one new value back to the old one.

    Args:
        in_branch: whether it walks through the graph of a branch, whose tensors are `SOME` here.
    """

    def __init__(self, sources: Sources, owner: Owner, *, in_branch: bool = False) -> None:
        self._sources = sources
        self._owner = owner
        self._bit = sources.bit(owner)
        self.is_in_branch = in_branch
        self._found: dict[tuple[int, str], Form | None] = {}

    def of(self, tensor: tf.Tensor) -> Form | None:
        """Return the form of a tensor; None if the tensor does not depend on the old value."""
        if not self.depends(tensor):
            return None
        key = id(tensor.graph), tensor.name
        if key not in self._found:
            self._found[key] = self._form(tensor)
        return self._found[key]

    def _form(self, tensor: tf.Tensor) -> Form:
        if self._sources.is_value_of(tensor, self._owner):
            return Form()
        outer = self._sources.captured(tensor)
        if outer is not None:
            return self.of(outer) or Form()
        rule = _RULES.get(tensor.op.type)
        form = None if rule is None else rule(self, tensor.op, tensor)
        return Form.of_value(self.field(tensor)) if form is None else form

    def depends(self, tensor: tf.Tensor) -> bool:
        """Return True if a tensor depends on the old value."""
        return bool(self._sources.of(tensor).any & self._bit)

    def field(self, tensor: tf.Tensor, dtype_of: tf.Tensor | None = None) -> Field:
        """Return a tensor as a field of a form: a number if it is a constant."""
        constant = _constant(tensor, tensor if dtype_of is None else dtype_of)
        return constant if is_number(constant) or not self.is_in_branch else SOME

    def in_branches(self, outputs: Sequence[tf.Tensor]) -> list[Form]:
        """Return the forms of the outputs of branches; they have no tensors."""
        walk = _Walk(self._sources, self._owner, in_branch=True)
        forms = [walk.of(output) for output in outputs]
        return [
            Form.of_value(walk.field(output), is_exact=True) if form is None else form
            for form, output in zip(forms, outputs, strict=True)
        ]

    def old_value(self) -> tf.Tensor:
        """Return the old value."""
        return self._sources.value_of(self._owner)


def _constant(tensor: tf.Tensor, like: tf.Tensor) -> Field:
    """Return the number that a tensor holds if it is known; else the tensor."""
    value = tf.get_static_value(tensor) if tensor.shape.num_elements() == 1 else None
    if value is None or not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        return tensor
    return value.reshape(()).astype(like.dtype.as_numpy_dtype)[()]


def _has_size_of(tensor: tf.Tensor, other: tf.Tensor) -> bool:
    size = tensor.shape.num_elements()
    return size is not None and size == other.shape.num_elements()


# Rules: each returns the form of an output of an operation; None if it knows nothing of it.


def _same(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
    index = output.value_index if operation.type == "IdentityN" else 0
    return walk.of(operation.inputs[index])


def _cast(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
    (given,) = operation.inputs
    is_same_kind = (given.dtype.is_floating and output.dtype.is_floating) or (
        given.dtype.is_integer and output.dtype.is_integer
    )
    form = walk.of(given)
    if form is None or not is_same_kind:
        return None

    def cast(field: Field) -> Field:
        if field is SOME:
            return SOME
        if is_number(field):
            return output.dtype.as_numpy_dtype(field)
        return tf.cast(field, output.dtype)

    return form.mapped(cast)


def _reshaped(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
    given = operation.inputs[0]
    form = walk.of(given)
    if form is None or not _has_size_of(output, given) or not output.shape.is_fully_defined():
        return None

    def reshape(field: Field) -> Field:
        if field is SOME or is_number(field) or field.shape.rank == 0:
            return field
        return tf.reshape(tf.broadcast_to(field, given.shape), output.shape)

    return form.mapped(reshape)


def _elementwise(
    of_one: Callable[[Form, Field], Form | None],
    of_both: Callable[[Form, Form], Form | None] = lambda one, other: None,
    of_other: Callable[[Form, Field], Form | None] | None = None,
) -> _Rule:
    """Return the rule of an operation with two operands, at each place.

    Args:
        of_one: the form, from that of the first operand and a second one that is independent of the
            old value.
        of_both: the form, from those of two operands that depend on it.
        of_other: the form, from that of the second operand and an independent first one. Default:
            as `of_one`.
    """

    def rule(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
        left, right = operation.inputs
        one, other = walk.of(left), walk.of(right)
        if not all(_has_size_of(output, t) for t, f in ((left, one), (right, other)) if f):
            return None
        if one is not None and other is not None:
            return of_both(one, other)
        if one is not None:
            return of_one(one, walk.field(right))
        assert other is not None  # the output depends on the old value
        return (of_one if of_other is None else of_other)(other, walk.field(left))

    return rule


def _add_n(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
    return _sum_of(walk, list(operation.inputs), output)


def _sum_of(walk: _Walk, tensors: list[tf.Tensor], output: tf.Tensor) -> Form | None:
    total: Form | None = None
    for tensor in tensors:
        form = walk.of(tensor)
        if form is not None:
            if not _has_size_of(output, tensor):
                return None
            total = form if total is None else total.plus_form(form)
            if total is None:
                return None
    for tensor in tensors:
        if walk.of(tensor) is None and total is not None:
            total = total.plus(walk.field(tensor))
    return total


def _clipped(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
    value, low, high = operation.inputs
    form = walk.of(value)
    if form is None or walk.depends(low) or walk.depends(high) or not _has_size_of(output, value):
        return None
    return form.at_most(walk.field(high)).at_least(walk.field(low))


def _rectified(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
    form = walk.of(operation.inputs[0])
    if form is None:
        return None
    number = output.dtype.as_numpy_dtype
    form = form.at_least(number(0))
    return form.at_most(number(6)) if operation.type == "Relu6" else form


def _selected(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
    condition, then, otherwise = operation.inputs
    compared = _compared(walk, condition, then, otherwise)
    if compared is not None:
        return compared
    branches = (then, otherwise)
    if not all(_has_size_of(output, t) for t in branches if walk.depends(t)):
        return None
    one, other = (
        walk.of(t) or Form.of_value(walk.field(t, output), is_exact=True) for t in branches
    )
    chosen = SOME if walk.is_in_branch else condition
    form = one.or_else(chosen, other, output.dtype)
    if not walk.depends(condition):
        return form
    return Form(form.change, form.replaces, is_exact=False)


def _compared(
    walk: _Walk, condition: tf.Tensor, then: tf.Tensor, otherwise: tf.Tensor
) -> Form | None:
    """Return the form of `where(x > v, x, v)` and the like: a maximum or a minimum."""
    kind = condition.op.type
    if kind not in ("Greater", "GreaterEqual", "Less", "LessEqual"):
        return None
    left, right = condition.op.inputs
    takes_left = _is_same(left, then) and _is_same(right, otherwise)
    takes_right = _is_same(right, then) and _is_same(left, otherwise)
    one, other = walk.of(then), walk.of(otherwise)
    if not (takes_left or takes_right) or (one is None) == (other is None):
        return None
    form, old, bound = (one, then, otherwise) if one is not None else (other, otherwise, then)
    if form is None or not _has_size_of(condition, old):
        return None
    is_maximum = kind.startswith("Greater") == takes_left
    return form.at_least(walk.field(bound)) if is_maximum else form.at_most(walk.field(bound))


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor that a broadcast or an identity was made from."""
    while tensor.op.type in ("BroadcastTo", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor


def _is_same(one: tf.Tensor, other: tf.Tensor, depth: int = 4) -> bool:
    """Return True if two tensors are the same, or are computed alike from the same ones."""
    one, other = _origin(one), _origin(other)
    if one is other:
        return True
    first, second = one.op, other.op
    is_pure = not first.op_def.is_stateful and first.type != "Placeholder"
    if not depth or not is_pure or one.value_index != other.value_index:
        return False
    return (
        first.type == second.type
        and len(first.inputs) == len(second.inputs)
        and first.node_def.attr == second.node_def.attr
        and all(map(_is_same, first.inputs, second.inputs, [depth - 1] * len(first.inputs)))
    )


def _reduced(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
    """Return the form of `reduce_max(stack([v, x]))` and the like."""
    given, axes = operation.inputs
    parts = _parts(given, axes, output)
    if parts is None:
        return None
    dependent = [part for part in parts if walk.depends(part)]
    if walk.is_in_branch or not all(_has_size_of(output, part) for part in dependent):
        return None
    reduce = {"Max": tf.reduce_max, "Min": tf.reduce_min, "Sum": tf.reduce_sum}[operation.type]
    pieces = [
        part if walk.depends(part) or part.shape == output.shape else reduce(part) for part in parts
    ]
    if operation.type == "Sum":
        return _sum_of(walk, pieces, output)
    form = walk.of(dependent[0]) if len(dependent) == 1 else None
    for piece in pieces:
        if form is not None and not walk.depends(piece):
            bound = walk.field(piece)
            form = form.at_least(bound) if operation.type == "Max" else form.at_most(bound)
    return form


def _parts(given: tf.Tensor, axes: tf.Tensor, output: tf.Tensor) -> list[tf.Tensor] | None:
    """Return the tensors whose reduction `output` is; None if they are not known."""
    reduced = tf.get_static_value(axes)
    if reduced is None:
        return None
    given = _origin(given)
    if given.op.type == "Pack":
        axis = given.op.get_attr("axis") % given.shape.rank
        if [int(a) % given.shape.rank for a in reduced.reshape(-1)] == [axis]:
            return list(given.op.inputs)
    if output.shape.num_elements() != 1:
        return None
    # All elements are reduced to one, so their places do not matter.
    pending, parts = [given], []
    while pending:
        tensor = _origin(pending.pop())
        if tensor.op.type == "Pack":
            pending += list(tensor.op.inputs)
        elif tensor.op.type == "ConcatV2":
            pending += list(tensor.op.inputs)[:-1]
        elif tensor.op.type in ("Reshape", "ExpandDims", "Squeeze"):
            pending.append(tensor.op.inputs[0])
        else:
            parts.append(tensor)
    return parts


def _either(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
    one, other = operation.inputs
    dependent, bound = (one, other) if walk.depends(one) else (other, one)
    form = walk.of(dependent)
    if form is None or walk.depends(bound) or not _has_size_of(output, dependent):
        return None
    field = walk.field(bound)
    return form.at_least(field) if operation.type == "LogicalOr" else form.at_most(field)


def _scattered(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
    """Return the form of a value of which some places are added to, bounded or replaced."""
    value, *others = operation.inputs
    form = walk.of(value)
    if form is None or any(walk.depends(t) for t in others) or walk.is_in_branch:
        return None

    is_slice = operation.type == "XlaDynamicUpdateSlice"
    updates, indices = others if is_slice else reversed(others)

    def scattered(fill: Field, updates: tf.Tensor) -> tf.Tensor:
        filled = tf.fill(output.shape, tf.constant(fill, output.dtype))
        if is_slice:
            return keras.ops.slice_update(filled, indices, updates)
        node = getattr(tf.raw_ops, operation.type)
        return node(tensor=filled, indices=indices, updates=updates)

    if not output.shape.is_fully_defined():
        return None
    match operation.type:
        case "TensorScatterAdd" | "TensorScatterSub":
            return form.plus(scattered(0, updates))
        case "TensorScatterMax":
            return form.at_least(scattered(least_of(output.dtype), updates))
        case "TensorScatterMin":
            return form.at_most(scattered(largest_of(output.dtype), updates))
    kept = Form(Change(scattered(1, tf.zeros_like(updates)), scattered(0, updates)), replaces=True)
    return kept if form == Form() else None


def _conditional(walk: _Walk, operation: tf.Operation, output: tf.Tensor) -> Form | None:
    """Return the form of an output of a `tf.cond`.

    The tensors of its branches stay inside. So its addend is the difference between the output and
    the old value, and the output is the bound.
    """
    index = output.value_index
    graphs = _compat.get_func_graphs(operation)
    forms = walk.in_branches([graph.outputs[index] for graph in graphs])
    condition = operation.inputs[0]
    is_exact = all(form.is_exact for form in forms) and not walk.depends(condition)
    replaces = any(form.replaces for form in forms)
    value = SOME if walk.is_in_branch else output
    for bound in ("low", "high"):
        if any(form.is_bounded for form in forms) and all(
            form.change._replace(**{bound: None}) == Change() for form in forms
        ):
            return Form(Change(**{bound: value}), is_exact=is_exact)
    factors = [1 if form.change.scale is None else form.change.scale for form in forms]
    if any(form.is_bounded for form in forms) or not all(map(is_number, factors)):
        return None
    if all(form == Form() for form in forms):
        return Form()
    if walk.is_in_branch:
        scale = factors[0] if factors[0] == factors[1] else SOME
        return Form(
            Change(None if is_number(scale) and scale == 1 else scale, SOME), replaces, is_exact
        )
    old = walk.old_value()
    if not (old.dtype == output.dtype and _has_size_of(output, old)):
        return None
    then, otherwise = factors
    if then == otherwise:
        addend = output if then == 0 else output - old * tf.cast(then, old.dtype)
        return Form(Change(None if then == 1 else then, addend), replaces, is_exact)
    scale = tf.where(tf.cast(condition, tf.bool), *(tf.cast(f, old.dtype) for f in factors))
    if old.dtype.is_bool:
        return Form(Change(scale, tf.logical_and(output, tf.logical_not(scale))), True, is_exact)
    kept = tf.math.multiply_no_nan(old, scale) if old.dtype.is_floating else old * scale
    return Form(Change(scale, output - kept), replaces, is_exact)


_SAME = (
    "CheckNumerics",
    "EnsureShape",
    "Identity",
    "IdentityN",
    "PreventGradient",
    "Snapshot",
    "StopGradient",
)
_RESHAPES = ["BroadcastTo", "ExpandDims", "Reshape", "Squeeze"]
_SCATTERS = ["Add", "Max", "Min", "Sub", "Update"]
_ADD = _elementwise(Form.plus, Form.plus_form)
_MULTIPLY = _elementwise(Form.times)


def _minus(form: Form, term: Field) -> Form | None:
    return form.plus(negated(term))


def _minus_form(one: Form, other: Form) -> Form | None:
    negative = other.times(-1)
    return None if negative is None else one.plus_form(negative)


def _from(form: Form, term: Field) -> Form | None:
    negative = form.times(-1)
    return None if negative is None else negative.plus(term)


def _divided(form: Form, divisor: Field) -> Form | None:
    return form.times(reciprocal(divisor))


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(_RESHAPES, _reshaped),
    **{f"TensorScatter{name}": _scattered for name in _SCATTERS},
    "XlaDynamicUpdateSlice": _scattered,
    "Add": _ADD,
    "AddV2": _ADD,
    "AddN": _add_n,
    "Cast": _cast,
    "ClipByValue": _clipped,
    "If": _conditional,
    "StatelessIf": _conditional,
    "LogicalAnd": _either,
    "LogicalOr": _either,
    "Max": _reduced,
    "Min": _reduced,
    "Sum": _reduced,
    "Maximum": _elementwise(Form.at_least),
    "Minimum": _elementwise(Form.at_most),
    "Mul": _MULTIPLY,
    "MulNoNan": _MULTIPLY,
    "Neg": lambda walk, operation, _: _negative(walk.of(operation.inputs[0])),
    "RealDiv": _elementwise(_divided, of_other=lambda form, term: None),
    "Relu": _rectified,
    "Relu6": _rectified,
    "SelectV2": _selected,
    "Sub": _elementwise(_minus, _minus_form, _from),
}


def _negative(form: Form | None) -> Form | None:
    return None if form is None else form.times(-1)
