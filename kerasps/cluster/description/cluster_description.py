"""`ClusterDescription`: the tasks of a cluster, and the task of this process."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kerasps.errors import ClusterConfigError
from kerasps.runtime.addresses import split_address

TASK_TYPES = ("chief", "worker", "ps")
# The side-car evaluator reads the same TF_CONFIG but is not part of the cluster: no other task
# connects to it.
EVALUATOR = "evaluator"


@dataclass(frozen=True)
class ClusterDescription:
    """A cluster's tasks, and the task of this process.

    ```python
    description = kerasps.ClusterDescription(
        jobs={
            "chief": ("host0:2222",),
            "worker": ("host1:2222", "host2:2222"),
            "ps": ("host3:2222",),
        },
        task_type="chief",
        task_index=0,
    )
    assert description.addresses[("worker", 1)] == "host2:2222"
    ```

    Args:
        jobs: the addresses (`"host:port"`) of the tasks of each job, in the order of their indices;
            `""` for a task whose address a sparse specification leaves out.
        task_type: the job of this process: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        task_index: the index of this process in its job.
        is_sparse: whether the jobs list only the tasks that this task has to know, as for TFJob's
            dynamic workers. Default False.
    """

    jobs: Mapping[str, tuple[str, ...]]
    task_type: str
    task_index: int
    is_sparse: bool = False

    @property
    def addresses(self) -> dict[tuple[str, int], str]:
        """The address of every task, keyed by (task type, task index)."""
        return {
            (job, index): address
            for job, tasks in self.jobs.items()
            for index, address in enumerate(tasks)
            if address
        }

    @property
    def server_addresses(self) -> dict[tuple[str, int], str]:
        """The addresses of the tasks that run a server for the coordinator: workers and ps."""
        return {
            task: address for task, address in self.addresses.items() if task[0] in ("worker", "ps")
        }

    @property
    def is_on_one_machine(self) -> bool:
        """True if all workers and ps certainly run on this machine.

        That is so if only this machine can reach their addresses (`127.0.0.1`, `localhost`).
        """
        return all(
            is_loopback(split_address(address)[0]) for address in self.server_addresses.values()
        )

    @property
    def task(self) -> tuple[str, int]:
        """This process's task: its job and its index there."""
        return self.task_type, self.task_index

    @property
    def address(self) -> str | None:
        """The address of this process, None for an evaluator."""
        return self.addresses.get(self.task)

    def for_task(self, task_type: str, task_index: int) -> ClusterDescription:
        """Return the same cluster, seen from the task `task_index` of the job `task_type`."""
        return ClusterDescription(self.jobs, task_type, task_index, self.is_sparse)

    def as_cluster_spec(self) -> dict[str, Any]:
        """Return the addresses by job, as the constructor of `tf.train.ClusterSpec` takes them.

        A job with unknown addresses is a dictionary with the index of each known task.
        """
        return {
            job: list(tasks)
            if all(tasks) and not (self.is_sparse and job == "worker")
            else {index: address for index, address in enumerate(tasks) if address}
            for job, tasks in self.jobs.items()
        }

    def as_tf_config(self) -> dict[str, Any]:
        """Return the content of TF_CONFIG for this task; `json.dumps` it to set the variable."""
        return {
            "cluster": self.as_cluster_spec(),
            "task": {"type": self.task_type, "index": self.task_index},
        }


def require_chief(
    description: ClusterDescription, *, source: str = "TF_CONFIG"
) -> ClusterDescription:
    """Return `description` if this process is the chief, else raise."""
    if description.task_type == "chief":
        return description
    received = f"task type {description.task_type!r}, index {description.task_index}"
    if description.task_type == EVALUATOR:
        fix = "An evaluator creates no strategy: it reads checkpoints."
    else:
        fix = (
            f"Run `kerasps serve` in this {description.task_type} task, and the script in the "
            "chief only."
        )
    raise ClusterConfigError(
        "Only the chief of the cluster creates a ParameterServerStrategy. Expected: task type "
        f"'chief' in {source}. Received: {received}. {fix}"
    )


def is_loopback(host: str) -> bool:
    """Return whether only its own machine can reach a host, which is given without a port."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
