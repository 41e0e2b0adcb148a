"""Chooses TensorFlow's graph optimizations (Grappler) for functions on tasks.

Each task optimizes a function before it runs it for the first time, which takes a second for tens
of thousands of operations. So kerasps turns off useless passes: those for GPUs if there are none,
and all of them for a function that runs once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasps import _compat


@contextlib.contextmanager
def optimizing(*, is_on: bool = True) -> Iterator[None]:
    """In this context, this thread's calls of functions, also in graphs, use these passes.

    Those are all that may change the speed or, in the last bit, results; none without `is_on`. A
    function whose first call had other passes is optimized again.
    """
    context = _compat.eager_context()
    before = context.function_call_options
    has_gpus = bool(tf.config.list_logical_devices("GPU"))
    context.function_call_options = _options(
        before.executor_type, before.config_proto_serialized, is_on, has_gpus
    )
    try:
        yield
    finally:
        context.function_call_options = before


@functools.cache
def _options(executor: str | None, config: bytes, is_on: bool, has_gpus: bool) -> Any:
    """Return the given options of calls, with the optimizer's unset options filled in."""
    proto = tf.compat.v1.ConfigProto.FromString(config)
    options = proto.graph_options.rewrite_options
    if not is_on:
        options.disable_meta_optimizer = True
    elif not has_gpus:
        # The passes that choose data layouts for a GPU, and that save its memory.
        if options.layout_optimizer == options.DEFAULT:
            options.layout_optimizer = options.OFF
        if options.memory_optimization == options.DEFAULT_MEM_OPT:
            options.memory_optimization = options.NO_MEM_OPT
    return _compat.FunctionCallOptions(executor, proto)
