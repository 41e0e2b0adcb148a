"""TensorFlow cluster resolvers: for a `LocalCluster`, and for renamed jobs."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from kerasps.cluster.description.cluster_description import EVALUATOR, ClusterDescription
from kerasps.cluster.description.forms import MASTER, named_as_here, with_names_of_here
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.description.tf_config import CHIEF_VARIABLE
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


class RenamedJobsResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """Tells TensorFlow another resolver's jobs, with `master` as the chief and no evaluators."""

    def __init__(self, given: ClusterResolver) -> None:
        super().__init__()
        self._given: Any = given

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Return the current tasks."""
        spec = self._given.cluster_spec().as_dict()
        return tf.train.ClusterSpec(with_names_of_here(spec, source=type(self._given).__name__))

    def master(self, *args: object, **kwargs: object) -> Any:
        """Return the result of the other resolver's `master`."""
        return self._given.master(*args, **kwargs)

    @property
    def task_type(self) -> Any:
        """The job of this process, under the name that kerasps uses."""
        return named_as_here(getattr(self._given, "task_type", None))

    @property
    def task_id(self) -> Any:
        """The index of this process in its job."""
        return getattr(self._given, "task_id", None)

    @property
    def rpc_layer(self) -> Any:
        """The protocol of the other resolver."""
        return getattr(self._given, "rpc_layer", None)


def with_jobs_renamed(resolver: ClusterResolver) -> ClusterResolver:
    """Return a resolver with the job names of TensorFlow: the same one if no job is renamed."""
    jobs = resolver.cluster_spec().as_dict()
    return RenamedJobsResolver(resolver) if {MASTER, EVALUATOR} & set(jobs) else resolver


def resolver_of_tf_config(description: ClusterDescription) -> ClusterResolver:
    """Return the cluster resolver of TF_CONFIG."""
    resolvers = tf.distribute.cluster_resolver
    if os.environ.get(CHIEF_VARIABLE):  # TensorFlow's resolver would find no chief
        spec = tf.train.ClusterSpec(description.as_cluster_spec())
        found: ClusterResolver = resolvers.SimpleClusterResolver(
            spec, task_type="chief", task_id=0, rpc_layer="grpc"
        )
    else:
        found = resolvers.TFConfigClusterResolver()
    return found
