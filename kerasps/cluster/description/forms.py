"""Converts the forms in which schedulers describe a cluster into one form.

`master` becomes the chief, a listed evaluator is removed, and a sparse specification (TFJob's
dynamic workers) becomes lists with empty addresses. If there is no chief, a worker can become it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kerasps.cluster.description.checking import reject
from kerasps.cluster.description.cluster_description import EVALUATOR
from kerasps.runtime.addresses import MAX_DIGITS

MASTER = "master"


def named_as_here(job: object) -> Any:
    """Return the name that kerasps uses for a job, or for a task's type."""
    return "chief" if job == MASTER else job


def with_names_of_here(cluster: object, *, source: str) -> Any:
    """Return the jobs of a cluster with `master` as the chief, and without evaluators.

    Args:
        cluster: addresses by job. Anything but a mapping is returned unchanged.
    """
    if not isinstance(cluster, Mapping):
        return cluster
    if cluster.get("chief") and cluster.get(MASTER):
        reject(
            f"The cluster in {source} has a chief and a master",
            "one of them: `master` is an older name of the chief",
            dict(cluster),
            source=source,
        )
    jobs = {job: tasks for job, tasks in cluster.items() if job != EVALUATOR}
    if MASTER in jobs:
        jobs["chief"] = jobs.pop(MASTER) or jobs.get("chief") or []
    return jobs


def is_sparse(cluster: object) -> bool:
    """Return whether a cluster lists only the tasks that one task has to know."""
    return isinstance(cluster, Mapping) and isinstance(cluster.get("worker"), Mapping)


def without_gaps_left_out(
    cluster: Mapping[str, object], task_type: str, task_index: object, *, source: str
) -> dict[str, Any]:
    """Return a sparse specification as lists, with `""` for each task that it leaves out.

    TFJob gives a dynamic worker `{"worker": {"3": "host:2222"}, "ps": [...]}`, and a ps a list that
    contains only itself, whatever its index.
    """
    jobs = dict(cluster)
    workers: dict[int, object] = {}
    listed = cluster["worker"]
    for index, address in listed.items() if isinstance(listed, Mapping) else ():
        text = str(index)
        if not re.fullmatch(r"[0-9]{1,6}", text):
            reject(
                f"An index of the sparse worker job in {source} is not an index",
                "a whole number from 0",
                repr(index),
                source=source,
            )
        workers[int(text)] = address
    jobs["worker"] = [workers.get(index, "") for index in range(max(workers, default=-1) + 1)]
    ps = cluster.get("ps")
    if (
        task_type == "ps"
        and not workers
        and isinstance(ps, (list, tuple))
        and len(ps) == 1
        and isinstance(task_index, int)
        and 0 < task_index < 10 ** (MAX_DIGITS // 4)
    ):
        jobs["ps"] = [*[""] * task_index, *ps]
    return jobs


def with_worker_as_chief(
    cluster: Mapping[str, object], task_type: str, task_index: object, chief: str
) -> tuple[dict[str, Any], str, object]:
    """Make one worker of a cluster without a chief the chief; all tasks must do the same.

    The indices of the workers after it decrease by one, as in `tf.estimator` for worker 0.

    Returns:
        The cluster with a chief, and this task's job and index in it.
    """
    job, _, number = chief.partition(":")
    listed = cluster.get("worker") if isinstance(cluster, Mapping) else None
    workers = list(listed) if isinstance(listed, (list, tuple)) else []
    if job != "worker" or not re.fullmatch(r"[0-9]{1,6}", number) or int(number) >= len(workers):
        reject(
            "KERASPS_CHIEF names no worker of the cluster",
            f"worker:N with N from 0 to {len(workers) - 1}",
            repr(chief),
            source="KERASPS_CHIEF",
        )
    if cluster.get("chief"):
        reject(
            "KERASPS_CHIEF is set for a cluster that has a chief",
            "no such variable, since TF_CONFIG lists the chief",
            f"KERASPS_CHIEF={chief}, and chief {cluster['chief']}",
            source="KERASPS_CHIEF",
        )
    place = int(number)
    others = [address for index, address in enumerate(workers) if index != place]
    jobs = {**cluster, "chief": [workers[place]], "worker": others}
    if task_type == "worker" and task_index == place:
        return jobs, "chief", 0
    if task_type == "worker" and isinstance(task_index, int) and task_index > place:
        return jobs, "worker", task_index - 1
    return jobs, task_type, task_index
