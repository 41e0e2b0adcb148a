"""Lets workers that are about to leave end, once they have no steps or results any more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from kerasps.cluster.members.presence import Status
from kerasps.cluster.members.shared_presence import SharedPresence
from kerasps.cluster.serving.leaving import MAY_END, NAME_FILE


class Departures:
    """Dismisses workers that are about to leave, and counts the users of the workers.

    A worker that is about to leave waits until the coordinator dismisses it. While a training uses
    the workers (see `in_use`), it calls `dismiss` for each that has no steps or results any more.
    While nobody uses them, `idle` returns those to dismiss. Thread: any.
    """

    def __init__(self, shared: SharedPresence) -> None:
        self._shared = shared
        self._num_users = 0
        # Workers whose dismissal is in progress.
        self._dismissing: set[int] = set()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """In this context, do not dismiss leaving workers before the caller calls `dismiss`."""
        with self._shared.lock:
            self._num_users += 1
        try:
            yield
        finally:
            with self._shared.lock:
                self._num_users -= 1

    def idle(self) -> list[int]:
        """Return the workers that are about to leave while nobody uses the workers.

        Call with the lock of the presence held.
        """
        return [] if self._num_users else self._shared.presence.of("worker", Status.LEAVING)

    def dismiss(self, worker: int) -> None:
        """Tell a worker that is about to leave to end now. Call when it has no results any more."""
        with self._shared.lock:
            if worker in self._dismissing:
                return
            self._dismissing.add(worker)
            self._shared.presence.let_end(("worker", worker))
        # In a separate thread, since the worker may hang by now, or have ended.
        threading.Thread(target=self._complete_dismissal, args=[worker], daemon=True).start()

    def _complete_dismissal(self, worker: int) -> None:
        _tell_to_end(worker)
        with self._shared.changed:
            noticed = self._shared.presence.left(("worker", worker), time.monotonic())
            self._dismissing.discard(worker)
        self._shared.follow(noticed)


def _tell_to_end(worker: int) -> None:
    """Tell a worker that is about to leave that it may end."""
    with contextlib.suppress(tf.errors.OpError), tf.device(f"/job:worker/task:{worker}"):
        tf.io.write_file(NAME_FILE, MAY_END)
