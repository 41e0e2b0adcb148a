"""The clusters of `kerasps launch`: all tasks beside a script, or only ps beside workers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.local.local_cluster import LocalCluster

# The script needs the tasks when it has imported TensorFlow, which occupies a core for about so
# long. Until then it gets a core: with four tasks starting at once on two cores, imports took
# 4.0 s, and with one task after the other 3.0 s.
_IMPORTS_S = 3.0


class LaunchedCluster(LocalCluster):
    """A cluster whose constructor does not wait until the processes are ready.

    The strategy in the script waits for them. The arguments are those of `LocalCluster`.
    """

    _is_started = False

    def look_at_start(self) -> None:
        """Start the next processes, and watch them once all are ready.

        Does not wait: call repeatedly.
        """
        if self._is_started:
            return
        pending = self._pending(self._processes.values(), self._began + self._start_timeout)
        room = len(os.sched_getaffinity(0)) - 1 - len(pending)
        if time.monotonic() > self._began + _IMPORTS_S:
            room = len(self._waiting)
        for task in self._waiting[: max(room, 0 if pending else 1)]:
            self._waiting.remove(task)
            pending.append(self._new_process(*task))
        if not pending:
            self._is_started = True
            self._watch.start()

    def _start_all(self) -> None:
        self._began = time.monotonic()
        self._waiting = list(self._own_tasks())
        self.look_at_start()


class LocalPS(LocalCluster):
    """The ps processes of a cluster on this machine, and the addresses of its workers.

    The arguments are those of `LocalCluster`.
    """

    def worker_description(self, worker: int) -> ClusterDescription:
        """Return the cluster as a worker sees it, without a chief: worker 0 acts as the chief."""
        jobs = {job: tasks for job, tasks in self.description.jobs.items() if job != "chief"}
        return ClusterDescription(jobs, "worker", worker)

    def worker_environment(self, worker: int) -> dict[str, str]:
        """Return the environment of the process of a worker."""
        env = self._environment_of("worker", worker)
        env["TF_CONFIG"] = json.dumps(self.worker_description(worker).as_tf_config())
        return env

    def keep_logs(self) -> None:
        """Keep the directory of logs when the cluster is closed."""
        self._keep_logs = True

    def _own_tasks(self) -> Iterable[tuple[str, int]]:
        return [task for task in super()._own_tasks() if task[0] == "ps"]
