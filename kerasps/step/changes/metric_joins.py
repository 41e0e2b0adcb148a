"""Finds how the states of metrics that several workers compute are joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.step.changes.forms import Form
from kerasps.step.changes.sources import Sources
from kerasps.variables import ParameterServerVariable
from kerasps.variables.keras.joins import Join


def metric_joins(
    sources: Sources, forms_of: Sequence[tuple[ParameterServerVariable, list[Form]]]
) -> list[Join | None]:
    """Return the join of each metric's state; None for a state that cannot be joined."""
    of_metrics = sources.mask({id(variable) for variable, _ in forms_of})

    def is_alone(form: Form) -> bool:
        """Return True if the change of a state follows from the batch, not from any state."""
        tensors = [field for field in form.change if isinstance(field, tf.Tensor)]
        return not any(sources.of(tensor).any & of_metrics for tensor in tensors)

    joins: list[Join | None] = []
    for _, forms in forms_of:
        forms = [form for form in forms if form != Form()]
        found = {_join_of(form) if is_alone(form) else None for form in forms}
        joins.append(found.pop() if len(found) == 1 else None if found else Join.SUM)
    return joins


def _join_of(form: Form) -> Join | None:
    change = form.change
    if not form.is_exact:
        return None
    if change.only_adds:
        return Join.SUM
    is_bound = change.scale is None and change.addend is None
    if is_bound and change.high is None:
        return Join.MAXIMUM
    return Join.MINIMUM if is_bound and change.low is None else None


def check_metrics(
    method: str, metrics: Iterable[ParameterServerVariable], joins: Sequence[Join | None]
) -> None:
    """Check that the states of all metrics can be joined.

    Raises UnsupportedError if one cannot. Workers compute it from parts of the data, and no rule
    makes one of these states.
    """
    refused = [v for v, join in zip(metrics, joins, strict=True) if join is None]
    if not refused:
        return
    names = ", ".join(f"'{variable.path}'" for variable in refused)
    raise UnsupportedError(
        f"{method} replaces, scales or mixes the state of a metric: {names}. Each worker computes "
        "the state from its part of the data, and such states cannot be made one. Expected: a "
        "state that is a sum, a maximum or a minimum over batches, as in "
        "`total.assign(total + x)` or `keras.ops.maximum(largest, x)`, with an `x` that depends on "
        f"the batch and not on a metric. Received: {names}. Keep sums and compute the rest in "
        "`result`, as `keras.metrics.Mean` does; or compile with `run_eagerly=True`, where one "
        "process does all steps in order."
    )
