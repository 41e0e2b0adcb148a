"""TensorFlow cluster resolvers: for a `LocalCluster`, and for a cluster's description."""

from __future__ import annotations

import tensorflow as tf

from kerasps.cluster.description.cluster_description import EVALUATOR, ClusterDescription
from kerasps.cluster.description.forms import MASTER
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.local.local_registry import LocalTasks


class LocalClusterResolver(tf.distribute.cluster_resolver.SimpleClusterResolver):
    """Tells a strategy the tasks of a `LocalCluster`, and keeps the cluster alive.

    So with `ParameterServerStrategy(LocalCluster(2, 1).cluster_resolver)`, the cluster lives as
    long as the strategy.
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
        """Return the current tasks: workers may have joined."""
        jobs = self.local_cluster.description.jobs
        return tf.train.ClusterSpec({job: list(tasks) for job, tasks in jobs.items()})


def resolver_of(description: ClusterDescription) -> ClusterResolver:
    """Return a resolver for TensorFlow's constructor, with this process as the chief."""
    jobs = {**description.as_cluster_spec(), "chief": [str(description.address)]}
    found: ClusterResolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    return found


def with_jobs_renamed(
    resolver: ClusterResolver, description: ClusterDescription
) -> ClusterResolver:
    """Return a resolver with the job names of TensorFlow: the given one if no job is renamed."""
    jobs = resolver.cluster_spec().as_dict()
    return resolver_of(description) if {MASTER, EVALUATOR} & set(jobs) else resolver
