"""Overlap: the pull of a step runs while the push of the step before is in flight.

Without overlap, the pull of a step waits, on each ps, until the push before is applied: both touch
the same variables, and a graph keeps the order of such operations. With overlap, the pull waits for
the push of the step before the last. So the values of a step lack at most one update of its worker,
the last one, and a step waits for the network once, not twice.

The worker does not pull values that it knows better than the ps: the number of iterations, and
those by which a step replaces a value (see `StateChange.replaces`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import tensorflow as tf

from kerasps.step.contract.change import StateChange
from kerasps.step.phases.step_context import StepContext
from kerasps.step.records.identity import IdentitySet
from kerasps.step.tracing.plan import StepPlan

# A step waits for the push of the step this many before it.
_DISTANCE = 2


class Overlap:
    """Makes the steps of one step graph overlap."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        # Separate handles: a graph makes operations on one handle wait for each other.
        self._handles = plan.find_handles()
        # The last steps in each graph; loops and branches have their own graphs.
        self._recent: dict[Any, deque[StepContext]] = {}
        self._loops: dict[Any, tf.Tensor] = {}
        changes = plan.push.changes
        counters = IdentitySet(o._iterations for o in plan.inventory.optimizers)
        states = list(enumerate(changes.states))
        self._counters = [(i, change) for i, change in states if change.variable in counters]
        self._replaced = [(i, change) for i, change in states if change.replaces]

    def after_loop(self, steps: tf.Tensor) -> None:
        """Make later steps in this graph wait for a loop over earlier ones."""
        self._loops[tf.compat.v1.get_default_graph()] = steps

    def before_pull(self, step: StepContext) -> None:
        """Set what the pull of a step waits for."""
        graph = tf.compat.v1.get_default_graph()
        recent = self._recent.setdefault(graph, deque(maxlen=_DISTANCE))
        step.pull_handles = self._handles
        if len(recent) == _DISTANCE:
            step.before_pull = recent[0].pushes
        elif graph in self._loops:
            loop = [self._loops[graph].op]
            step.before_pull = {pull.device: loop for pull in self._plan.pull.pulls}

    def after_pull(self, step: StepContext) -> None:
        """Replace pulled values that the worker knows better than the ps."""
        recent = self._recent[tf.compat.v1.get_default_graph()]
        if recent:
            before = recent[-1]
            step.add_values(
                (v, tf.maximum(step.values[v], _after(before, i, change, before.values[v])))
                for i, change in self._counters
                if (v := change.variable) in step.values
            )
            step.add_values(
                (v, _after(before, i, change, step.values[v]))
                for i, change in self._replaced
                if (v := change.variable) in step.values
            )
        recent.append(step)


def _after(before: StepContext, number: int, change: StateChange, value: tf.Tensor) -> tf.Tensor:
    """Return a value after the change that a step has pushed."""
    return before.outputs.changes[number].filled_from(change.numbers).of(value)
