"""The cluster of `kerasps launch`: it starts while the script imports TensorFlow."""

from __future__ import annotations

import time

from kerasps.cluster.local.local_cluster import LocalCluster


class LaunchedCluster(LocalCluster):
    """A cluster whose constructor does not wait until the processes are ready.

    The strategy in the script waits for them. The arguments are those of `LocalCluster`.
    """

    _is_started = False

    def look_at_start(self) -> None:
        """Begin to watch the processes once all are ready. Does not wait: call again and again.

        Raises:
            TaskStartError: a process ended before it was ready, or was not ready in time.
        """
        if self._is_started or self._pending(self._processes.values(), self._deadline):
            return
        self._is_started = True
        self._watch.start()

    def _start_all(self) -> None:
        self._deadline = time.monotonic() + self._start_timeout
        for task_type, task_index in self._own_tasks():
            self._new_process(task_type, task_index)
