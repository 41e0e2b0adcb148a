"""Logs that a step computes from the states of metrics, such as the root of a mean.

In a step, the state of a metric is that of the execution so far. So such a log would cover the last
execution of one worker alone. The part of the step's graph that leads from the states to the log is
cut out, and runs on the states of all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.step.compute.compute import Compute
from kerasps.step.compute.returned import Returned
from kerasps.variables import ParameterServerVariable


class DerivedLog:
    """A log as a function of the states of metrics."""

    def __init__(
        self,
        function: tf.types.experimental.ConcreteFunction,
        states: Sequence[ParameterServerVariable],
    ) -> None:
        self._function = function
        self._states = states

    def value(self) -> Any:
        """Return the log for the current values of the states."""
        with tf.device("/job:localhost/device:CPU:0"):
            return self._function(*[variable.storage.read_value() for variable in self._states])


def derived_logs(
    phase: Compute, graph: tf.Graph, returned: Returned, method: str
) -> dict[str, DerivedLog]:
    """Return the logs that follow from the states of metrics at the end of the step.

    Args:
        returned: the logs that the step returned; those that are results of metrics do not count.

    Raises UnsupportedError if a log depends on such a state, and on something else.
    """
    metrics = list(phase.inventory.metrics)
    sources = phase.values.sources
    of_metrics = sources.mask({id(variable) for variable in metrics})
    dependent = {
        name: log
        for name, log in zip(returned.log_names, returned.logs, strict=True)
        if name not in returned.results and sources.of(log).any & of_metrics
    }
    if not dependent:
        return {}
    states = {phase.values.last(variable).name: variable for variable in metrics}
    graph_def = graph.as_graph_def()
    return {name: _derived(name, log, states, graph_def, method) for name, log in dependent.items()}


def _derived(
    name: str,
    log: tf.Tensor,
    states: dict[str, ParameterServerVariable],
    graph_def: tf.compat.v1.GraphDef,
    method: str,
) -> DerivedLog:
    used: dict[str, ParameterServerVariable] = {}
    found: set[str] = set()
    pending = [log]
    while pending:
        tensor = pending.pop()
        operation = tensor.op
        if tensor.name in states:
            used[tensor.name] = states[tensor.name]
        elif operation.type in ("Placeholder", "ReadVariableOp"):
            raise UnsupportedError(
                f"{method} returns a log that it computes from a metric, and from something else "
                "or before the metric is complete. Expected: the result of a metric, or a function "
                f"of such results after the last `update_state`. Received: the log '{name}', which "
                "would cover the last steps of one worker. Return the two values as two logs, or "
                "compute it in a callback."
            )
        elif operation.name not in found:
            found.add(operation.name)
            pending += list(operation.inputs)
    subgraph = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
    for node in graph_def.node:
        if node.name in found:
            kept = subgraph.node.add()
            kept.CopyFrom(node)
            kept.device = ""
            kept.attr.pop("_class", None)
            inputs = [source for source in node.input if not source.startswith("^")]
            del kept.input[:]
            kept.input.extend(inputs)

    def compute(*values: tf.Tensor) -> tf.Tensor:
        feeds = dict(zip(used, values, strict=True))
        (value,) = tf.graph_util.import_graph_def(subgraph, feeds, [log.name], name="log")
        return value

    specs = [tf.TensorSpec(v.storage.shape, v.storage.dtype) for v in used.values()]
    with tf.init_scope(), tf.device(None):
        function = tf.function(compute, autograph=False).get_concrete_function(*specs)
    return DerivedLog(function, list(used.values()))
