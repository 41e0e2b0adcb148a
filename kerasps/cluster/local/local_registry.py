"""The LocalClusters of this process, and the one that it is connected to."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.processes.process import TaskProcess
from kerasps.cluster.processes.restarts import Task
from kerasps.errors import ClusterConfigError, KeraspsError, PSLostError
from kerasps.runtime.connected import closed_error, connected_strategy
from kerasps.runtime.forks import is_fork


class LocalTasks(Protocol):
    """The part of a `LocalCluster` that code which connects to it uses."""

    @property
    def description(self) -> ClusterDescription:
        """The tasks and their addresses."""

    @property
    def processes(self) -> Mapping[Task, TaskProcess]:
        """The process of each task."""

    @property
    def is_closed(self) -> bool:
        """True once the cluster is closed or closing."""

    @property
    def process_ends(self) -> bool:
        """True if the cluster ends because this process does."""

    def check_open(self) -> None:
        """Raise `ClusterClosedError` if it is closed."""

    def before_close(
        self, callback: Callable[[str], None], notice: Callable[[str], None] | None = None
    ) -> None:
        """Register functions to call before the tasks end; `notice` before any task is killed."""

    def end_with_process(self) -> None:
        """Keep it until this process ends."""


_clusters: weakref.WeakSet[LocalTasks] = weakref.WeakSet()
# The one that this process is connected to, with the id of the process: a fork is not connected.
_connected: tuple[LocalTasks, int] | None = None


def note_cluster(cluster: LocalTasks) -> None:
    """Record a cluster that knows its addresses. This does not keep it alive."""
    _clusters.add(cluster)


def note_connected(cluster: LocalTasks) -> None:
    """Record the cluster that this process is connected to, and keep it alive."""
    global _connected
    _connected = cluster, os.getpid()


def connected_cluster() -> LocalTasks | None:
    """Return the open cluster that this process is connected to, None if there is none."""
    if _connected is None:
        return None
    cluster, process = _connected
    return cluster if process == os.getpid() and not cluster.is_closed else None


def local_cluster_of(description: ClusterDescription) -> LocalTasks | None:
    """Return the cluster of this process with these tasks, preferably an open one; else None."""
    jobs = {job: description.jobs.get(job) for job in ("chief", "ps")}
    found = [
        cluster
        for cluster in list(_clusters)
        if all(cluster.description.jobs[job] == addresses for job, addresses in jobs.items())
    ]
    return min(found, key=lambda cluster: cluster.is_closed, default=None)


def check_is_wanted(
    arguments: Mapping[str, object],
    expected: Mapping[str, object],
    processes: Mapping[Task, TaskProcess],
) -> None:
    """Check that a further call of the constructor means the connected cluster, and its ps run."""
    for name, value in arguments.items():
        if value != expected[name]:
            raise ClusterConfigError(
                f"Argument `{name}` differs from that of the LocalCluster which this process is "
                f"connected to. Expected: {name}={expected[name]!r}, which returns that cluster. "
                f"Received: {name}={value!r}. Pass the first value, or restart the process (in a "
                "notebook, the kernel): TensorFlow connects a process once. `add_worker` adds a "
                "worker to the running cluster."
            )
    for (job, index), process in processes.items():
        if job == "ps" and process.has_ended():
            raise PSLostError(
                f"ps {index} of the LocalCluster that this process is connected to has ended "
                f"({process.describe_exit()}), and its variables with it. Expected: a cluster "
                "whose ps run. Received: a further call for it. Restart the process (in a "
                "notebook, the kernel) and load the last checkpoint: TensorFlow connects a "
                "process once.",
                task_type="ps",
                task_index=index,
            )


def check_may_start() -> None:
    """Raise if this process was connected before: it can use no further cluster."""
    strategy = connected_strategy()
    if strategy is None or is_fork():
        return
    closed = closed_error("a further LocalCluster")
    if closed is not None:
        raise closed
    raise KeraspsError(
        "This process is connected to a cluster already, and TensorFlow connects a process once. "
        f"Expected: the use of that cluster, {strategy!r}. Received: a further LocalCluster. "
        "Continue with the first one, or start another process (in a notebook, restart the kernel)."
    )
