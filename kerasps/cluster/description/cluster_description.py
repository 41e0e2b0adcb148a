"""The tasks of a cluster, and TF_CONFIG, the environment variable that describes them.

TensorFlow's own reading of TF_CONFIG accepts almost anything and fails much later, or hangs. Here a
description is checked as a whole before anything connects, and each error says what is wrong in it.
Nothing in this module needs TensorFlow, except `check_cluster_resolver`, which is handed one of its
objects.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kerasps.checks import count
from kerasps.errors import ClusterConfigError
from kerasps.runtime.addresses import MAX_DIGITS, split_address

TASK_TYPES = ("chief", "worker", "ps")
# The side-car evaluator reads the same TF_CONFIG but is no part of the cluster: no other task ever
# connects to it.
EVALUATOR = "evaluator"

_EXAMPLE = (
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}, '
    '"task": {"type": "chief", "index": 0}}'
)
_ADD_CHIEF = (
    'Add "chief": ["host:port"] to the cluster in every task: the address of the machine that runs '
    "the script, and a free port there. (Where each worker runs the script, by a "
    "`kerasps.WorkerDrivenStrategy`, no chief is needed.) "
)


@dataclass(frozen=True)
class ClusterDescription:
    """A cluster's tasks and which of them this process is.

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
        jobs: the addresses (`"host:port"`) of the tasks of each job, in the order of their indices.
        task_type: the job of this process: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.
        task_index: the index of this process in its job.
    """

    jobs: Mapping[str, tuple[str, ...]]
    task_type: str
    task_index: int

    @property
    def addresses(self) -> dict[tuple[str, int], str]:
        """The address of every task, keyed by (task type, task index)."""
        return {
            (job, index): address
            for job, tasks in self.jobs.items()
            for index, address in enumerate(tasks)
        }

    @property
    def server_addresses(self) -> dict[tuple[str, int], str]:
        """The addresses of the tasks that run a server for the coordinator: workers and ps."""
        return {
            task: address for task, address in self.addresses.items() if task[0] in ("worker", "ps")
        }

    @property
    def is_on_one_machine(self) -> bool:
        """True where all workers and ps are known to run on this machine.

        They are where only this machine can reach their addresses (`127.0.0.1`, `localhost`).
        """
        return all(
            is_loopback(split_address(address)[0]) for address in self.server_addresses.values()
        )

    @property
    def address(self) -> str | None:
        """The address of this process, None for an evaluator."""
        return self.addresses.get((self.task_type, self.task_index))

    def for_task(self, task_type: str, task_index: int) -> ClusterDescription:
        """Return the same cluster, seen from the task `task_index` of the job `task_type`."""
        return ClusterDescription(self.jobs, task_type, task_index)

    def as_tf_config(self) -> dict[str, Any]:
        """Return the content of TF_CONFIG for this task; `json.dumps` it to set the variable."""
        return {
            "cluster": {job: list(tasks) for job, tasks in self.jobs.items()},
            "task": {"type": self.task_type, "index": self.task_index},
        }


def read_tf_config(text: str | None = None, *, needs_chief: bool = True) -> ClusterDescription:
    """Read TF_CONFIG and check it.

    Args:
        text: the JSON text. None (default) reads the environment variable TF_CONFIG.
        needs_chief: whether there must be a chief. There need not be one where each worker drives
            its own steps.

    Returns:
        The cluster, and this process's place in it.

    Raises:
        ClusterConfigError: the text is not JSON, or describes no cluster that parameter-server
            training can use.
    """
    config = _content(text)
    cluster = config.get("cluster")
    if not cluster:
        reject(
            "TF_CONFIG has no cluster",
            'a "cluster" entry that lists the addresses of chief, worker and ps tasks',
            config,
        )
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task:
        reject(
            "TF_CONFIG does not say which task this is",
            'a "task" entry like {"type": "chief", "index": 0}',
            task,
        )
    if config.get("rpc_layer") not in (None, "grpc"):
        reject(
            "The rpc_layer in TF_CONFIG is none that tasks speak",
            '"grpc", or no such entry',
            repr(config["rpc_layer"]),
        )
    index = task.get("index", 0)
    if isinstance(index, str) and index.isdecimal() and len(index) < MAX_DIGITS:
        # Schedulers fill the index in from an environment variable, which leaves it in quotes;
        # TensorFlow accepts that too.
        index = int(index)
    description = checked_cluster(
        cluster, task["type"], index, source="TF_CONFIG", needs_chief=needs_chief
    )
    num_tasks = len(description.jobs.get(description.task_type, ()))
    if "index" not in task and num_tasks > 1:
        expected = (
            f'an "index" from 0 to {num_tasks - 1} in "task", since {num_tasks} '
            f"{description.task_type} tasks are listed"
        )
        reject("TF_CONFIG does not say which of several tasks this is", expected, task)
    return description


def _content(text: str | None) -> dict[str, Any]:
    """Return the object in the JSON text of TF_CONFIG; None takes the environment variable's."""
    if text is None:
        text = os.environ.get("TF_CONFIG", "")
        if not text.strip():
            raise ClusterConfigError(
                f"TF_CONFIG is not set. Expected: a description of the cluster like {_EXAMPLE}. "
                "Received: TF_CONFIG unset or empty. Start the script with `kerasps launch`, use "
                "`kerasps.LocalCluster`, or set TF_CONFIG in every task."
            )
    try:
        config = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as exc:
        raise ClusterConfigError(
            f"TF_CONFIG is not JSON: {exc}. Expected: text like {_EXAMPLE}. Received: {text!r}. "
            "Correct the text; in a shell, put it in single quotes."
        ) from exc
    if not isinstance(config, dict):
        reject("TF_CONFIG is not a JSON object", f"an object like {_EXAMPLE}", config)
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON takes the last of several entries with one name, and forgets the tasks in the others.
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        reject("TF_CONFIG has an entry twice", "each name once in an object", json.dumps(twice))
    return entries


def require_chief(
    description: ClusterDescription, *, source: str = "TF_CONFIG"
) -> ClusterDescription:
    """Return `description` where this process is the chief.

    Args:
        description: the cluster, and this process's place in it.
        source: where the description comes from, for the message. Default: TF_CONFIG.

    Raises:
        ClusterConfigError: this process is another task.
    """
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
        "A ParameterServerStrategy is created by the chief of the cluster only. Expected: task "
        f"type 'chief' in {source}. Received: {received}. {fix}"
    )


def is_loopback(host: str) -> bool:
    """Return whether a host, without a port, is one that only its own machine can reach."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def checked_cluster(
    cluster: object, task_type: Any, task_index: Any, *, source: str, needs_chief: bool = True
) -> ClusterDescription:
    """Return a description of a cluster, and of this process's place in it, once it is checked.

    Args:
        cluster: lists of addresses by job.
        task_type: the job of this process.
        task_index: its index there.
        source: where they come from, for the message.
        needs_chief: as for `read_tf_config`.

    Raises:
        ClusterConfigError: one of them is wrong.
    """
    jobs = checked_jobs(cluster, source=source, needs_chief=needs_chief)
    _check_task(jobs, task_type, task_index, source)
    return ClusterDescription(jobs, task_type, task_index)


def checked_jobs(cluster: object, *, source: str, needs_chief: bool) -> dict[str, tuple[str, ...]]:
    """Return the addresses of each job of a cluster, once they are checked.

    Args and errors are those of `checked_cluster`.
    """
    if not isinstance(cluster, Mapping):
        reject(
            f"The cluster in {source} is not an object",
            "job names with lists of addresses",
            cluster,
            source=source,
        )
    if EVALUATOR in cluster:
        reject(
            f"The cluster in {source} lists an evaluator",
            "chief, worker and ps jobs only: an evaluator is named in its own task entry and "
            "nowhere else",
            sorted(cluster),
            source=source,
        )
    unknown = sorted(set(cluster) - set(TASK_TYPES))
    if unknown:
        reject(
            f"The cluster in {source} has unknown jobs",
            f"jobs named {', '.join(TASK_TYPES)}",
            ", ".join(unknown),
            source=source,
        )
    jobs = {job: _addresses(job, cluster[job], source) for job in TASK_TYPES if job in cluster}
    for job, fix in (
        ("ps", "ps task, which holds the variables"),
        ("worker", "worker task, which computes the steps"),
    ):
        if not jobs.get(job):
            reject(
                f"The cluster in {source} has no {job}",
                f"at least one {fix}",
                dict(cluster),
                source=source,
            )
    if len(jobs.get("chief", ())) != 1 and (needs_chief or "chief" in jobs):
        problem = "several chiefs" if jobs.get("chief") else "no chief"
        reject(
            f"The cluster in {source} has {problem}",
            "exactly one chief task, which runs the training script",
            jobs.get("chief", ()),
            source=source,
            advice="" if jobs.get("chief") else _ADD_CHIEF,
        )
    _check_addresses_differ(jobs, source)
    return jobs


def _check_addresses_differ(jobs: Mapping[str, tuple[str, ...]], source: str) -> None:
    seen: dict[str, str] = {}
    for job, tasks in jobs.items():
        for index, address in enumerate(tasks):
            if address in seen:
                reject(
                    f"Two tasks in {source} have the same address",
                    "an address of its own for each task",
                    f"{address!r} for {seen[address]} and for {job} {index}",
                    source=source,
                )
            seen[address] = f"{job} {index}"


def _addresses(job: str, tasks: object, source: str) -> tuple[str, ...]:
    if not isinstance(tasks, (list, tuple)):
        reject(
            f"The {job} job in {source} is not a list",
            'a list of addresses like ["host:2222"]',
            tasks,
            source=source,
        )
    for address in tasks:
        try:
            split_address(address if isinstance(address, str) else "")
        except ValueError:
            reject(
                f"An address of the {job} job in {source} is malformed",
                '"host:port" with a port from 1 to 65535',
                repr(address),
                source=source,
            )
    return tuple(tasks)


def _check_task(
    jobs: Mapping[str, tuple[str, ...]], task_type: object, task_index: Any, source: str
) -> None:
    if not isinstance(task_type, str):
        expected = f"one of {', '.join(jobs)}, or {EVALUATOR}, as text"
        what = f"The task type in {source} is not a name"
        reject(what, expected, repr(task_type), source=source)
    try:
        count(
            f"The task index in {source} is not an index",
            task_index,
            least=0,
            expected="a whole number from 0",
            advice=_advice(source),
        )
    except (TypeError, ValueError) as exc:
        raise ClusterConfigError(str(exc)) from None
    if task_type == EVALUATOR:  # it has an index, and is in no job
        return
    if task_type not in jobs:
        expected = f"one of {', '.join(jobs)}, or {EVALUATOR}"
        reject(
            f"The task type in {source} is not in its cluster",
            expected,
            repr(task_type),
            source=source,
        )
    if task_index >= len(jobs[task_type]):
        num_tasks = len(jobs[task_type])
        expected = (
            f"an index from 0 to {num_tasks - 1}, since {num_tasks} {task_type} tasks are listed"
        )
        reject(
            f"The task index in {source} is not in its cluster",
            expected,
            f"{task_type} {task_index}",
            source=source,
        )


def reject(
    what: str, expected: str, received: object, *, source: str = "TF_CONFIG", advice: str = ""
) -> NoReturn:
    """Raise the error of a cluster that is described wrongly.

    Args:
        what: what is wrong, without a full stop.
        expected: what was expected.
        received: what was received.
        source: where it comes from. Default: TF_CONFIG.
        advice: a sentence that goes before the usual advice, with a space at its end.

    Raises:
        ClusterConfigError: always.
    """
    raise ClusterConfigError(
        f"{what}. Expected: {expected}. Received: {received}. {advice}{_advice(source)}"
    )


def _advice(source: str) -> str:
    return (
        "Correct TF_CONFIG; `kerasps env` checks it."
        if source == "TF_CONFIG"
        else "Correct the cluster resolver."
    )
