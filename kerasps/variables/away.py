"""Metric and seed-generator states that the steps of custom loops keep on a ps.

The states of metrics and seed generators are on the coordinator, which alone writes them (see
`variable.py`). `fit` sends a worker its seeds and gets metric sums back. A function that the user
schedules brings back only its return values. So each such state that it touches has a stand-in on a
ps. A metric's stand-in adds up there, under the lock of the push and as part of it. A seed
generator's stand-in advances there. A read of the state on the coordinator fetches the stand-in's
value first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from kerasps.runtime.errors import naming_lost_ps
from kerasps.runtime.on_ps import OnPS, under_lock
from kerasps.variables.kinds import is_seed_state
from kerasps.variables.named import NamedVariable
from kerasps.variables.phase import entering
from kerasps.variables.variable import ParameterServerVariable


class AwayStates:
    """The stand-ins of the states of metrics and seed generators.

    Args:
        mutex: returns the lock of a device, given the device's name.
    """

    def __init__(self, mutex: Callable[[str], tf.Tensor]) -> None:
        self._mutex = mutex
        self._lock = threading.RLock()
        self._homes: dict[str, list[weakref.ref[ParameterServerVariable]]] = {}
        self._functions: dict[tuple[str, tuple[int, ...]], OnPS] = {}

    def state_of(self, variable: ParameterServerVariable, device: str) -> ParameterServerVariable:
        """Return the stand-in of a metric's or a seed generator's state; make it if there is none.

        Args:
            variable: the state on the coordinator.
            device: the device of the ps on which a new stand-in is made.
        """
        with self._lock:
            if variable.away is None:
                variable.away = self._make(variable, device)
                variable.bring_home = self.bring_home
                self._homes.setdefault(device, []).append(weakref.ref(variable))
            return variable.away

    def _make(self, variable: ParameterServerVariable, device: str) -> ParameterServerVariable:
        value = variable.storage
        # A metric's stand-in starts at zero; a generator's starts at the generator's state.
        initial = value.read_value if is_seed_state(variable) else lambda: tf.zeros_like(value)
        with tf.init_scope(), entering(None), tf.device(device):
            storage = NamedVariable(
                initial, shape=value.shape, dtype=value.dtype, trainable=False, name="away"
            )
            return ParameterServerVariable(
                storage, dtype=value.dtype.name, trainable=False, name=f"{variable.name}_away"
            )

    def bring_home(self, variable: ParameterServerVariable) -> None:
        """Fetch to the coordinator all states that are on the same ps as that of `variable`.

        All values of one ps are of the same instant, between two pushes. Thread: any.
        """
        assert variable.away is not None
        device = variable.away.device
        with self._lock:
            homes = [home for ref in self._homes[device] if (home := ref()) is not None]
            self._homes[device] = [weakref.ref(home) for home in homes]
            with tf.init_scope(), entering(None), naming_lost_ps:
                values = self._exchange(device, homes).take()
                for home, value in zip(homes, values, strict=True):
                    if is_seed_state(home):
                        home._value.assign(value)
                    else:
                        home._value.assign_add(value)

    def _exchange(self, device: str, homes: Sequence[ParameterServerVariable]) -> OnPS:
        """Return the function that reads the stand-ins on a ps and sets metrics' ones to zero."""
        key = device, tuple(id(home.away) for home in homes)
        if key not in self._functions:
            states = [home.away._value for home in homes if home.away is not None]
            clears = [not is_seed_state(home) for home in homes]
            for stale in [known for known in self._functions if known[0] == device]:
                del self._functions[stale]
            self._functions[key] = OnPS(
                device, lambda: _take(states, clears), mutex=self._mutex(device)
            )
        return self._functions[key]


def _take(states: Sequence[tf.Variable], clears: Sequence[bool]) -> list[tf.Tensor]:
    values = [tf.identity(state.read_value()) for state in states]
    with tf.control_dependencies(values):
        for state, is_cleared in zip(states, clears, strict=True):
            if is_cleared:
                state.assign(tf.zeros(state.shape, state.dtype), read_value=False)
    return values


def drawn(mutex: tf.Tensor, states: Sequence[tf.Variable], draws: Sequence[int]) -> list[tf.Tensor]:
    """Return the states of seed generators and advance them, in a graph that runs on their ps.

    Args:
        mutex: the lock of the ps.
        states: the stand-ins' storages: the seed and the counter of each.
        draws: how many seeds are drawn from each.
    """

    def draw() -> list[tf.Tensor]:
        values = [tf.identity(state.read_value()) for state in states]
        with tf.control_dependencies(values):
            for state, count in zip(states, draws, strict=True):
                state.assign_add(tf.constant([0, count], state.dtype), read_value=False)
        return values

    return under_lock(mutex, draw)[0]
