"""Checks the description of a whole cluster, before any task connects.

TensorFlow accepts almost anything and fails much later, or hangs. Each error here names the mistake
in the description.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from kerasps.checks import count
from kerasps.cluster.description.cluster_description import (
    EVALUATOR,
    TASK_TYPES,
    ClusterDescription,
)
from kerasps.errors import ClusterConfigError
from kerasps.runtime.addresses import split_address

# Sources of descriptions: schedulers whose variables kerasps reads.
SLURM, JOBSET = "Slurm", "JobSet"
_ADD_CHIEF = (
    'Add "chief": ["host:port"] to the cluster in every task: the address of the machine that runs '
    "the script, and a free port there. (No chief is needed if each worker runs the script, with a "
    "`kerasps.WorkerDrivenStrategy`.) Or set KERASPS_CHIEF=worker:0 in every task to make the "
    "first worker the chief. "
)


def checked_cluster(
    cluster: object,
    task_type: Any,
    task_index: Any,
    *,
    source: str,
    needs_chief: bool = True,
    may_be_sparse: bool = False,
) -> ClusterDescription:
    """Check a cluster, and this process's place in it, and return their description."""
    jobs = checked_jobs(
        cluster, source=source, needs_chief=needs_chief, may_be_sparse=may_be_sparse
    )
    _check_task(jobs, task_type, task_index, source)
    return ClusterDescription(jobs, task_type, task_index, may_be_sparse)


def checked_jobs(
    cluster: object, *, source: str, needs_chief: bool, may_be_sparse: bool = False
) -> dict[str, tuple[str, ...]]:
    """Check the addresses of each job of a cluster, and return them.

    Arguments and errors are those of `checked_cluster`.
    """
    if not isinstance(cluster, Mapping):
        reject(
            f"The cluster in {source} is not an object",
            "job names with lists of addresses",
            cluster,
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
    jobs = {
        job: _addresses(job, cluster[job], source, may_be_sparse=may_be_sparse)
        for job in TASK_TYPES
        if job in cluster
    }
    for job, fix in (
        ("ps", "ps task, which holds the variables"),
        ("worker", "worker task, which computes the steps"),
    ):
        if not any(jobs.get(job, ())) and not (may_be_sparse and job == "worker"):
            reject(
                f"The cluster in {source} has no {job}",
                f"at least one {fix}",
                dict(cluster),
                source=source,
                advice=_advice_without(job, cluster),
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


def _advice_without(job: str, cluster: Mapping[str, object]) -> str:
    """Return the setting of a scheduler that adds a missing job; empty if none is known."""
    if job == "ps" and set(cluster) <= {"worker", "chief"}:
        return (
            "Ray's TensorflowTrainer and schedulers of MultiWorkerMirroredStrategy list only "
            "workers: add ps tasks in the scheduler's job (TFJob: `tfReplicaSpecs.PS`; Azure ML: "
            "`parameter_server_count`). "
        )
    return ""


def _check_addresses_differ(jobs: Mapping[str, tuple[str, ...]], source: str) -> None:
    seen: dict[str, str] = {}
    for job, tasks in jobs.items():
        for index, address in enumerate(tasks):
            if address and address in seen:
                reject(
                    f"Two tasks in {source} have the same address",
                    "a different address for each task",
                    f"{address!r} for {seen[address]} and for {job} {index}",
                    source=source,
                )
            seen[address] = f"{job} {index}"


def _addresses(job: str, tasks: object, source: str, *, may_be_sparse: bool) -> tuple[str, ...]:
    if not isinstance(tasks, (list, tuple)):
        reject(
            f"The {job} job in {source} is not a list",
            'a list of addresses like ["host:2222"]',
            tasks,
            source=source,
        )
    for address in tasks:
        if address == "" and may_be_sparse:
            continue
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
    if task_type == EVALUATOR:  # it has an index but no job
        return
    if task_type not in jobs:
        expected = f"one of {', '.join(jobs)}, or {EVALUATOR}"
        reject(
            f"The task type in {source} is not in its cluster",
            expected,
            repr(task_type),
            source=source,
        )
    if task_index >= len(jobs[task_type]) or not jobs[task_type][task_index]:
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
    """Raise the error for a wrong description of a cluster."""
    raise ClusterConfigError(
        f"{what}. Expected: {expected}. Received: {received}. {advice}{_advice(source)}"
    )


def _advice(source: str) -> str:
    if source == "TF_CONFIG":
        return "Correct TF_CONFIG; `kerasps env` checks it."
    if source.isupper() or source.startswith("--"):  # another environment variable, or an option
        return f"Correct {source}."
    if source in (SLURM, JOBSET):
        return f"Correct the request to {source}."
    return "Correct the cluster resolver."
