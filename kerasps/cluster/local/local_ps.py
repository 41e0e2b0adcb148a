"""The ps of a cluster on this machine, whose workers the user starts."""

from __future__ import annotations

import json
from collections.abc import Iterable

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.local.local_cluster import LocalCluster


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
