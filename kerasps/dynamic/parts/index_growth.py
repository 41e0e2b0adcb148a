"""Gives the indexes of a strategy's pools larger memory, in a thread beside the steps."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable

import tensorflow as tf

from kerasps.dynamic.parts.key_index import EMPTY_LOG
from kerasps.dynamic.parts.key_part import KeyPart
from kerasps.runtime.calls import separate_executor
from kerasps.runtime.on_ps import OnPS, make_ready

# The places whose keys move in one call: the lock of the ps is held for about a millisecond.
_MOVED = 4096
# The seconds between two looks at an index that grows, between two of one that does not, and
# between two moves. With a million new keys a second, one is seen to be nearly full in time.
_SOON_S, _LATE_S, _PAUSE_S = 0.25, 2.0, 0.001
_STOP_S = 5.0


class IndexGrowth:
    """Watches the indexes of parts; its thread begins with the first part.

    When a call to a ps fails, that part is no longer watched: its index then doubles in pushes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._growing: weakref.WeakKeyDictionary[KeyPart, _Growing] = weakref.WeakKeyDictionary()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, part: KeyPart, mutex: tf.Tensor) -> None:
        """Watch the index of a part for as long as the part exists.

        Args:
            mutex: the lock of its ps.
        """
        growing = _Growing(part, mutex)
        with self._lock:
            self._growing[part] = growing
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run,
                    args=[weakref.ref(self), self._is_over],
                    name="kerasps-index",
                    daemon=True,
                )
                self._thread.start()

    def stop(self) -> None:
        """End the thread, since the cluster closes or the process ends. May be called twice."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def tend(self) -> float:
        """Look at each index, and grow those that are nearly full; return the seconds to wait."""
        with self._lock:
            watched = [(weakref.ref(part), growing) for part, growing in self._growing.items()]
        waits = [_LATE_S]
        for part, growing in watched:
            try:
                with separate_executor():
                    waits.append(growing.tend(self._is_over))
            except Exception:  # the cluster closes, or a ps is lost, which steps report
                known = part()
                if known is not None:
                    with self._lock:
                        self._growing.pop(known, None)
        return min(waits)


class _Growing:
    """The index of a part that is watched, and the functions that its ps runs for it.

    They are traced here: a trace waits until each task has replied, also those that are in a step.
    """

    def __init__(self, part: KeyPart, mutex: tf.Tensor) -> None:
        device, number = part.device, tf.TensorSpec([], tf.int64)
        # Functions keep what they refer to, and the end of a part ends its resources.
        known = weakref.ref(part)

        def of_part(body: Callable[..., object]) -> Callable[..., object]:
            return functools.partial(_of_part, known, body)

        self._prepare = OnPS(
            device, of_part(lambda part: part.index.prepare(part.num_keys())), mutex=mutex
        )
        self._fill = OnPS(device, of_part(lambda part, log: part.index.fill(log)), number)
        self._begin = OnPS(
            device,
            of_part(lambda part, log: part.index.begin(log, part.top())),
            number,
            mutex=mutex,
        )
        self._move = OnPS(
            device,
            of_part(lambda part, count: part.index.move(count, part.keys_between)),
            number,
            mutex=mutex,
        )
        for function in (self._prepare, self._fill, self._begin, self._move):
            make_ready([function])
        self._room, self._wait = 0, _SOON_S

    def tend(self, is_over: threading.Event) -> float:
        """Look at the index, and grow it if it is nearly full; return the seconds to wait."""
        log, phase, room = (int(number) for number in self._prepare.run_once())
        if log:
            self._give(log)
        if log or phase % 2:
            self._move_all(is_over)
        self._wait = _SOON_S if room != self._room else min(2 * self._wait, _LATE_S)
        self._room = room
        return self._wait

    def _give(self, log: int) -> None:
        """Give the table that is not in use memory, and let it be used."""
        self._fill.run_once(log)
        self._begin.run_once(log)

    def _move_all(self, is_over: threading.Event) -> None:
        left = 1
        while left > 0:
            if is_over.wait(_PAUSE_S):
                return
            (left,) = (int(number) for number in self._move.run_once(_MOVED))
        if left == 0:
            self._give(EMPTY_LOG)


def _of_part(
    known: weakref.ref[KeyPart], body: Callable[..., object], *arguments: tf.Tensor
) -> object:
    return body(known(), *arguments)


def _run(growth_of: weakref.ref[IndexGrowth], is_over: threading.Event) -> None:
    wait = _SOON_S
    while not is_over.wait(wait):
        growth = growth_of()
        if growth is None:
            return
        wait = growth.tend()
        del growth
