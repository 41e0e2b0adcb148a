"""The cluster resolver of a `LocalCluster`."""

from __future__ import annotations

import tensorflow as tf

from kerasps.cluster.local.local_registry import LocalTasks


class LocalClusterResolver(tf.distribute.cluster_resolver.SimpleClusterResolver):
    """Tell a strategy the tasks of a `LocalCluster`, and keep the cluster for as long.

    So `ParameterServerStrategy(LocalCluster(2, 1).cluster_resolver)` has a cluster for as long as
    the strategy lives.

    Args:
        local_cluster: the cluster.
    """

    def __init__(self, local_cluster: LocalTasks) -> None:
        self.local_cluster = local_cluster
        super().__init__(
            self.cluster_spec(),
            task_type="chief",
            task_id=0,
            rpc_layer="grpc",
        )

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Return the tasks as they are now: workers may have joined."""
        jobs = self.local_cluster.description.jobs
        return tf.train.ClusterSpec({job: list(tasks) for job, tasks in jobs.items()})
