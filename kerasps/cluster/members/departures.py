"""Lets workers go that are about to leave, once they hold nothing any more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from kerasps.cluster.members.presence import Status
from kerasps.cluster.members.shared_presence import SharedPresence
from kerasps.cluster.serving.leaving import LET_GO, NAME_FILE


class Departures:
    """The workers that are about to leave, and who still uses the workers.

    A worker that is about to leave waits until the coordinator tells it to go. While somebody uses
    the workers, that user calls `dismiss` for each that holds nothing any more. While nobody does,
    `idle` names those to dismiss. Thread: any.

    Args:
        shared: says which workers are about to leave, and is told of those that have left.
    """

    def __init__(self, shared: SharedPresence) -> None:
        self._shared = shared
        self._num_users = 0
        # Workers that are being told that they may go.
        self._let_go: set[int] = set()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """In this context, workers that are about to leave are kept until they hold nothing."""
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
        """Tell a worker to go that is about to leave and holds nothing any more."""
        with self._shared.lock:
            if worker in self._let_go:
                return
            self._let_go.add(worker)
        # Apart, since the worker may hang by now, or be gone.
        threading.Thread(target=self._say_goodbye, args=[worker], daemon=True).start()

    def _say_goodbye(self, worker: int) -> None:
        _tell_to_go(worker)
        with self._shared.changed:
            noticed = self._shared.presence.left(("worker", worker), time.monotonic())
            self._let_go.discard(worker)
        self._shared.follow(noticed)


def _tell_to_go(worker: int) -> None:
    """Tell a worker that is about to leave that it may."""
    with contextlib.suppress(tf.errors.OpError), tf.device(f"/job:worker/task:{worker}"):
        tf.io.write_file(NAME_FILE, LET_GO)
