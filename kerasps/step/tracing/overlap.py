"""Overlap: the pull of a step runs while the push of the step before is on its way.

Without it the pull of a step waits, on each ps, until the push before is applied: both read or
write the same variables, and a graph keeps the order of such operations. With it the pull waits for
the push of the step before the last. So a step is worked out with values that lack one update at
most, its worker's own last one, and the latency of the network is waited for once, not twice.

What the worker itself knows better than the ps, it does not take from there: the number of
iterations, and what it pushes as a value (see `Compute.state_changes`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

import tensorflow as tf

from kerasps.step.phases.step_context import StepContext
from kerasps.step.records.identity import IdentitySet
from kerasps.step.tracing.plan import StepPlan

# A step waits for the push of the step so many before it.
_DISTANCE = 2


class Overlap:
    """Makes the steps of one step graph overlap.

    Args:
        plan: the step.
    """

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        # Handles of their own: a graph has operations on one handle wait for each other.
        self._handles = plan.lookup()
        # The last steps in each graph; those in a loop, or in a branch, are in one of their own.
        self._recent: dict[Any, deque[StepContext]] = {}
        self._loops: dict[Any, tf.Tensor] = {}
        changes = plan.push.changes
        counters = IdentitySet(o._iterations for o in plan.inventory.optimizers)
        self._counters = [(i, v) for i, v in enumerate(changes.deltas) if v in counters]
        self._assigned = list(enumerate(changes.assigned))

    def after_loop(self, steps: tf.Tensor) -> None:
        """Make the steps that follow in this graph wait for a loop over others.

        Args:
            steps: what the loop has counted.
        """
        self._loops[tf.compat.v1.get_default_graph()] = steps

    def before_pull(self, step: StepContext) -> None:
        """Say what the pull of a step waits for."""
        graph = tf.compat.v1.get_default_graph()
        recent = self._recent.setdefault(graph, deque(maxlen=_DISTANCE))
        step.pull_handles = self._handles
        if len(recent) == _DISTANCE:
            step.before_pull = recent[0].pushes
        elif graph in self._loops:
            loop = [self._loops[graph].op]
            step.before_pull = {pull.device: loop for pull in self._plan.pull.pulls}

    def after_pull(self, step: StepContext) -> None:
        """Put what the worker knows better than the ps in the place of what was pulled."""
        recent = self._recent[tf.compat.v1.get_default_graph()]
        if recent:
            before = recent[-1]
            step.add_values(
                (v, tf.maximum(step.values[v], before.values[v] + before.outputs.deltas[i]))
                for i, v in self._counters
                if v in step.values
            )
            step.add_values(
                (v, before.outputs.assigned[i]) for i, v in self._assigned if v in step.values
            )
        recent.append(step)
