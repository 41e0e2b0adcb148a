"""Chooses TensorFlow's graph optimizations (Grappler) for functions on tasks.

Each task optimizes a function before it runs it for the first time, which takes a second for tens
of thousands of operations. So kerasps turns off useless passes: those for GPUs if there are none,
and all of them for a function that runs once.
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

    LEAN: all passes that may change the speed or, in the last bit, the results.
    OFF: none.
    """

    LEAN = enum.auto()
    OFF = enum.auto()


@contextlib.contextmanager
def optimizing(how: GraphOptimizer) -> Iterator[None]:
    """In this context, this thread's calls of functions, also in graphs, use these optimizations.

    A function whose first call had other optimizations is optimized again.
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
    """Return the given options of calls, with the optimizer's unset options filled in."""
    proto = tf.compat.v1.ConfigProto.FromString(config)
    options = proto.graph_options.rewrite_options
    if how is GraphOptimizer.OFF:
        options.disable_meta_optimizer = True
    elif not has_gpus:
        # The passes that choose data layouts for a GPU, and that save its memory.
        if options.layout_optimizer == options.DEFAULT:
            options.layout_optimizer = options.OFF
        if options.memory_optimization == options.DEFAULT_MEM_OPT:
            options.memory_optimization = options.NO_MEM_OPT
    return _compat.FunctionCallOptions(executor, proto)
