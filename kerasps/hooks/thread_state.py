"""The state that TensorFlow and Keras keep for a thread, restored after an interrupt.

Ctrl-C can interrupt the `finally` or the `__exit__` that should end a scope. Then TensorFlow stays
in graph mode, and the next code fails ("numpy() is only available when eager execution is
enabled"), or Keras stops tracking variables. `fit` traces in the main thread, so it restores all
such scopes when it ends with an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasps import _compat

# Of TensorFlow's eager mode.
_EAGER = ("is_eager", "device_name", "device_spec", "scope_name", "function_call_options")
# Of Keras: attributes that a scope sets, and resets at its end.
_KERAS = (
    "autocast_scope",
    "current_call_ctx",
    "in_tf_graph_scope",
    "stateless_scope",
    "symbolic_scope",
    "tracking_on",
)


@contextlib.contextmanager
def left_as_found() -> Iterator[None]:
    """Restore the scopes of this thread after an error of any kind in this context."""
    state = _ThreadState()
    try:
        yield
    except BaseException:
        state.restore()
        raise


class _ThreadState:
    """The scopes that this thread has entered."""

    def __init__(self) -> None:
        self._eager = {name: getattr(_eager(), name) for name in _EAGER}
        self._keras = {name: vars(_compat.global_state).get(name) for name in _KERAS}
        # Each list with a copy of its content.
        self._stacks = [(stack, list(stack)) for stack in _stacks()]

    def restore(self) -> None:
        """Enter these scopes, and leave all others."""
        eager = _eager()
        for name, value in self._eager.items():
            setattr(eager, name, value)
        for name, value in self._keras.items():
            if vars(_compat.global_state).get(name) is not value:
                vars(_compat.global_state)[name] = value
        for stack, content in self._stacks:
            stack[:] = content


def _eager() -> Any:
    return _compat.eager_context()._thread_local_data


def _stacks() -> list[list[Any]]:
    """Return the lists to which a scope adds an item that it removes at its end."""
    graphs = _compat.default_graph_stack.stack
    strategies = tf.compat.v1.get_default_graph()._distribution_strategy_stack
    names = vars(_compat.global_state).setdefault("name_scope_stack", [])
    return [graphs, _compat.eager_context().context_switches.stack, strategies, names]
