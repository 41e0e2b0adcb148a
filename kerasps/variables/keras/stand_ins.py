"""Metric and seed-generator states that the steps of custom loops keep on a ps.

The states of metrics and seed generators are on the coordinator, which alone writes them (see
`variable.py`). `fit` sends a worker its seeds and gets metric sums back. A function that the user
schedules brings back only its return values. So each such state that it touches has a stand-in on a
ps. A metric's stand-in is joined there, under the lock of the push and as part of it. A seed
generator's stand-in advances there. A read of the state on the coordinator fetches the stand-in's
value first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.runtime.errors import naming_lost_ps
from kerasps.runtime.on_ps import OnPS, under_lock
from kerasps.variables.keras.joins import Join
from kerasps.variables.keras.variable import ParameterServerVariable
from kerasps.variables.lanes.phase import entering
from kerasps.variables.storage.named import NamedVariable


class StandIns:
    """The stand-ins of the states of metrics and seed generators."""

    def __init__(self, mutex: Callable[[str], tf.Tensor]) -> None:
        self._mutex = mutex
        self._lock = threading.RLock()
        self._originals: dict[str, list[weakref.ref[ParameterServerVariable]]] = {}
        self._joins: dict[int, Join | None] = {}
        self._functions: dict[tuple[str, tuple[int, ...]], OnPS] = {}

    def of(
        self, variable: ParameterServerVariable, device: str, join: Join | None = None
    ) -> ParameterServerVariable:
        """Return the stand-in of a metric's or a seed generator's state; make it if there is none.

        Args:
            device: the device of the ps on which a new stand-in is made.
            join: the way in which a metric's states are joined; None for a seed generator.

        Raises UnsupportedError if an earlier function joins the states of the metric in another
        way.
        """
        with self._lock:
            if variable.stand_in is None:
                variable.stand_in = self._make(variable, device, join)
                variable.fetch_stand_ins = self.fetch_stand_ins
                self._originals.setdefault(device, []).append(weakref.ref(variable))
                self._joins[id(variable.stand_in)] = join
            elif self._joins[id(variable.stand_in)] is not join:
                earlier = self._joins[id(variable.stand_in)]
                raise UnsupportedError(
                    f"Two functions change the state '{variable.path}' of a metric in different "
                    "ways, so that it cannot be made one of their states. Expected: "
                    f"{earlier.value if earlier else ''} over batches, as in the first function. "
                    f"Received: {join.value if join else ''}. Use a metric for each."
                )
            return variable.stand_in

    def _make(
        self, variable: ParameterServerVariable, device: str, join: Join | None
    ) -> ParameterServerVariable:
        value = variable.storage
        # A metric's stand-in starts as that of no batch; a generator's at the generator's state.
        spec = tf.TensorSpec(value.shape, value.dtype)
        initial = value.read_value if join is None else lambda: join.start(spec)
        with tf.init_scope(), entering(None), tf.device(device):
            storage = NamedVariable(
                initial, shape=value.shape, dtype=value.dtype, trainable=False, name="stand_in"
            )
            return ParameterServerVariable(
                storage, dtype=value.dtype.name, trainable=False, name=f"{variable.name}_stand_in"
            )

    def fetch_stand_ins(self, variable: ParameterServerVariable) -> None:
        """Fetch to the coordinator all states that are on the same ps as that of `variable`.

        All values of one ps are of the same instant, between two pushes. Thread: any.
        """
        assert variable.stand_in is not None
        device = variable.stand_in.device
        with self._lock:
            originals = [
                original for ref in self._originals[device] if (original := ref()) is not None
            ]
            self._originals[device] = [weakref.ref(original) for original in originals]
            with tf.init_scope(), entering(None), naming_lost_ps:
                values = self._exchange(device, originals).run_once()
                for original, value in zip(originals, values, strict=True):
                    join = self._joins[id(original.stand_in)]
                    stored = original._value
                    if join is not None:
                        value = join.tensors(stored.read_value(), value)
                    stored.assign(value)

    def _exchange(self, device: str, originals: Sequence[ParameterServerVariable]) -> OnPS:
        """Return the function that reads the stand-ins on a ps and starts metrics' ones anew."""
        key = device, tuple(id(original.stand_in) for original in originals)
        if key not in self._functions:
            states = [
                original.stand_in._value for original in originals if original.stand_in is not None
            ]
            joins = [self._joins[id(original.stand_in)] for original in originals]
            for stale in [known for known in self._functions if known[0] == device]:
                del self._functions[stale]
            self._functions[key] = OnPS(
                device, lambda: _read_and_restart(states, joins), mutex=self._mutex(device)
            )
        return self._functions[key]


def _read_and_restart(
    states: Sequence[tf.Variable], joins: Sequence[Join | None]
) -> list[tf.Tensor]:
    values = [tf.identity(state.read_value()) for state in states]
    with tf.control_dependencies(values):
        for state, join in zip(states, joins, strict=True):
            if join is not None:
                start = join.start(tf.TensorSpec(state.shape, state.dtype))
                state.assign(start, read_value=False)
    return values


def draw_seeds(
    mutex: tf.Tensor, states: Sequence[tf.Variable], draws: Sequence[int]
) -> list[tf.Tensor]:
    """Return the states of seed generators and advance them, in a graph that runs on their ps."""

    def draw() -> list[tf.Tensor]:
        values = [tf.identity(state.read_value()) for state in states]
        with tf.control_dependencies(values):
            for state, count in zip(states, draws, strict=True):
                state.assign_add(tf.constant([0, count], state.dtype), read_value=False)
        return values

    return under_lock(mutex, draw)[0]
