"""An interrupt that hits the very end of a scope of TensorFlow or Keras leaves none behind."""

from __future__ import annotations

import contextlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state, name_scope
from keras.src.utils import tracking
from tensorflow.python.eager import context
from tensorflow.python.framework import ops, stack

import kerasps
from support.models import counting_model, endless

# Functions that end scopes, each with what stands in its lines that do.
ENDS = {
    "mode": (context.Context._mode, "ctx.is_eager = old_is_eager"),
    "switches": (ops._DefaultGraphStack.get_controller, "context_switches.pop()"),
    "graphs": (stack.DefaultStack.get_controller, "self.stack.pop()"),
    "names": (name_scope.name_scope.__exit__, "name_scope_stack.pop()"),
    "tracking": (tracking.DotNotTrackScope.__exit__, "set_global_attribute"),
}


def scopes():
    switches = context.context().context_switches.stack
    names = global_state.get_global_attribute("name_scope_stack", default=[])
    return (
        tf.executing_eagerly(),
        len(switches),
        len(ops._default_graph_stack.stack),
        len(names),
        tracking.is_tracking_enabled(),
    )


def lines_with(text, code):
    with open(code.co_filename) as source:
        numbered = list(enumerate(source, start=1))
    last = max(line for *_, line in code.co_lines() if line is not None)
    return {n for n, line in numbered if code.co_firstlineno <= n <= last and text in line}


@contextlib.contextmanager
def interrupted_at_end_of(function, text):
    """Raises KeyboardInterrupt where this thread comes to the line that ends a scope."""
    code = getattr(function, "__wrapped__", function).__code__
    lines = lines_with(text, code)
    assert lines

    def trace_lines(frame, event, argument):
        if event == "line" and frame.f_lineno in lines:
            raise KeyboardInterrupt
        return trace_lines

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: trace_lines if frame.f_code is code else None)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("scope", ENDS)
def test_an_interrupt_within_the_end_of_a_scope_leaves_the_thread_as_it_was(strategy, scope):
    model = counting_model(strategy)
    before = scopes()
    with pytest.raises(KeyboardInterrupt), interrupted_at_end_of(*ENDS[scope]):
        model.fit(kerasps.DatasetCreator(endless), steps_per_epoch=5, verbose=0)
    assert scopes() == before
    done = int(model.optimizer.iterations.numpy())
    model.fit(kerasps.DatasetCreator(endless), steps_per_epoch=5, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == done + 5
    assert np.all(np.isfinite(keras.ops.convert_to_numpy(model.trainable_variables[0])))
