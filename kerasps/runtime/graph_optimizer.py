"""The choice of TensorFlow's graph optimizations (Grappler) for functions on tasks.

Each task optimizes a function before it runs it for the first time, and tens of thousands of
operations take it a second. So it is spared what changes nothing: passes that are about GPUs, where
there are none, and all of it where a function runs once.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasps import _compat


class GraphOptimizer(enum.Enum):
    """The optimizations of a function's graph.

    LEAN: all that may change how fast they are or, in the last bit, what they work out.
    OFF: nothing.
    """

    LEAN = enum.auto()
    OFF = enum.auto()


@contextlib.contextmanager
def optimizing(how: GraphOptimizer) -> Iterator[None]:
    """In this context, functions that this thread calls, or calls in a graph, are optimized so.

    A function of which the first call was elsewhere is optimized anew.
    """
    context = _compat.eager_context()
    before = context.function_call_options
    has_gpus = bool(tf.config.list_logical_devices("GPU"))
    context.function_call_options = _options(
        before.executor_type, before.config_proto_serialized, how, has_gpus
    )
    try:
        yield
    finally:
        context.function_call_options = before


@functools.cache
def _options(executor: str | None, config: bytes, how: GraphOptimizer, has_gpus: bool) -> Any:
    """Return options of calls: those given, with what they leave open of the optimizer set."""
    proto = tf.compat.v1.ConfigProto.FromString(config)
    options = proto.graph_options.rewrite_options
    if how is GraphOptimizer.OFF:
        options.disable_meta_optimizer = True
    elif not has_gpus:
        # Where operations of a GPU are to find their data, and how to get by with its memory.
        if options.layout_optimizer == options.DEFAULT:
            options.layout_optimizer = options.OFF
        if options.memory_optimization == options.DEFAULT_MEM_OPT:
            options.memory_optimization = options.NO_MEM_OPT
    return _compat.FunctionCallOptions(executor, proto)
