"""Gives functions that XLA compiles the values of variables on ps tasks.

XLA cannot use a resource of another machine, so such a function cannot read the storage. It gets
the value as a captured tensor, which is read whenever the function is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat


def graph_for_xla(*, in_call: bool = False) -> Any:
    """Return the graph of the function that is being traced for XLA, None if there is none.

    Args:
        in_call: whether the current graph is not that function, but is about to call it.
    """
    # TensorFlow marks the graph in which such a function is called; if no graph calls it, the graph
    # of the function.
    graph, inner = tf.compat.v1.get_default_graph(), None
    while graph is not None:
        if _compat.in_xla_context(graph) and not (in_call and inner is None):
            # A branch or a loop is a graph inside the function's.
            return graph if inner is None or type(inner).__name__ != "FuncGraph" else inner
        graph, inner = getattr(graph, "outer_graph", None), graph
    return None


def captured_value(
    graph: tf.Graph, variable: keras.Variable, read_at_call: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """Return a tensor of `graph` with the value of `variable` at each call of its function."""
    key = ("kerasps", id(variable))
    captures = graph._function_captures
    if key not in captures.by_ref_external:

        def read() -> list[tf.Tensor]:
            return [tf.convert_to_tensor(read_at_call())]

        graph.capture_call_time_value(
            read, tf.TensorSpec(variable._value.shape, variable._value.dtype), key=key
        )
        # If a graph calls the function, TensorFlow would read before that graph runs, and miss the
        # graph's assignments.
        read.output_spec = captures.by_ref_external[key].output_spec  # type: ignore[attr-defined]
        captures.by_ref_external[key] = read
    return captures.by_ref_internal[key]
