"""Finds a node's place in a cluster from the variables of Vertex AI, JobSet, Slurm and SageMaker.

Each function returns None if its platform's variables are not set, and raises `ClusterConfigError`
if they are set but do not describe a cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kerasps.cluster.description.checking import JOBSET, SLURM, checked_cluster, reject
from kerasps.cluster.description.cluster_description import EVALUATOR, ClusterDescription
from kerasps.cluster.description.hostlist import expand_hostlist, expand_repeated

# Vertex AI numbers its pools. They stand for these jobs.
_POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps"}
_EVALUATOR_POOL = "workerpool3"
# The variables that name a pod of a JobSet; a container may have them from its labels.
_JOBSET_NAMES = ("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_INDEX")
_ROLES = ("chief", "master", "ps", "worker", "evaluator")
_POD = re.compile(rf"(?P<jobset>.+)-(?P<role>{'|'.join(_ROLES)})-(?P<job>\d+)-\d+")
# The ports for Slurm's jobs: above 1023, and below those that Linux gives to clients (32768).
_FIRST_PORT, _NUM_PORTS, _PORTS_OF_JOB = 10_000, 20_000, 64


@dataclass(frozen=True)
class Sizes:
    """The numbers of tasks, for platforms that list nodes without their roles.

    Args:
        num_ps: the number of ps tasks. Default 1.
        num_workers: the number of worker tasks; None (default) for all remaining nodes.
        port: the port of the first task on a host; None (default) for the platform's port.
    """

    num_ps: int = 1
    num_workers: int | None = None
    port: int | None = None


def from_vertex(variables: Mapping[str, str], sizes: Sizes) -> ClusterDescription | None:
    """Return the cluster in Vertex AI's CLUSTER_SPEC."""
    text = variables.get("CLUSTER_SPEC", "").strip()
    if not text:
        return None
    try:
        spec = json.loads(text)
        pools, task = spec["cluster"], spec["task"]
        task_type, index = task["type"], task["index"]
        jobs = {_POOLS[pool]: hosts for pool, hosts in pools.items() if pool != _EVALUATOR_POOL}
        job = EVALUATOR if task_type == _EVALUATOR_POOL else _POOLS[task_type]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        reject(
            f"CLUSTER_SPEC is not in the form that Vertex AI writes ({type(exc).__name__}: {exc})",
            '{"cluster": {"workerpool0": [...], ...}, "task": {"type": "workerpool0", "index": 0}}',
            repr(text),
            source="CLUSTER_SPEC",
        )
    return checked_cluster(jobs, job, index, source="CLUSTER_SPEC")


def from_jobset(
    variables: Mapping[str, str], sizes: Sizes, hostname: str
) -> ClusterDescription | None:
    """Return the cluster of a JobSet, in which each task is a job of one pod."""
    pod = _jobset_pod(variables, hostname)
    if pod is None:
        return None
    jobset, role, index = pod
    source = JOBSET
    if sizes.num_workers is None:
        reject(
            "JobSet does not say how many workers there are",
            "the environment variables KERASPS_NUM_WORKERS and KERASPS_NUM_PS in every pod",
            "no KERASPS_NUM_WORKERS",
            source="KERASPS_NUM_WORKERS",
        )
    subdomain = variables.get("JOBSET_SUBDOMAIN") or jobset
    port = sizes.port or 2222
    is_master = role == "master"

    def address(job: str, number: int) -> str:
        return f"{jobset}-{job}-{number}-0.{subdomain}:{port}"

    jobs = {
        "chief": [address("master" if is_master else "chief", 0)],
        "worker": [address("worker", number) for number in range(sizes.num_workers)],
        "ps": [address("ps", number) for number in range(sizes.num_ps)],
    }
    return checked_cluster(jobs, "chief" if is_master else role, index, source=source)


def _jobset_pod(variables: Mapping[str, str], hostname: str) -> tuple[str, str, int] | None:
    """Return the name of the JobSet, and the role and index of this pod in it, if it is in one."""
    given = {name: variables[name] for name in _JOBSET_NAMES if variables.get(name)}
    role = given.get("REPLICATED_JOB_NAME")
    if role is not None and role not in _ROLES:
        reject(
            f"The job {role!r} of the JobSet is not a role",
            "jobs called chief, ps and worker, and perhaps evaluator",
            f"REPLICATED_JOB_NAME={role}; the host name is {hostname!r}",
            source=JOBSET,
            advice="Call the job that runs the script chief. ",
        )
    pod = _POD.fullmatch(hostname.partition(".")[0])
    if pod is not None and (given or "JOB_COMPLETION_INDEX" in variables):
        found = dict(zip(_JOBSET_NAMES, pod.groups(), strict=True))
        given = found | given
    if not given:
        return None
    if len(given) < len(_JOBSET_NAMES) or not given["JOB_INDEX"].isdecimal():
        reject(
            "JobSet's variables do not name this pod",
            f"{', '.join(_JOBSET_NAMES[:-1])} and {_JOBSET_NAMES[-1]}, or a host name "
            "<jobset>-<role>-<number>-<number>, as JobSet gives it",
            f"{given}; the host name is {hostname!r}",
            source=JOBSET,
        )
    return given["JOBSET_NAME"], given["REPLICATED_JOB_NAME"], int(given["JOB_INDEX"])


def from_slurm(variables: Mapping[str, str], sizes: Sizes) -> ClusterDescription | None:
    """Return the cluster of a Slurm step: rank 0 is the chief, the next ranks are the ps."""
    if "SLURM_STEP_NODELIST" not in variables or "SLURM_PROCID" not in variables:
        return None
    source = SLURM
    try:
        rank = int(variables["SLURM_PROCID"])
        num_tasks = int(variables["SLURM_STEP_NUM_TASKS"])
        nodes = expand_hostlist(variables["SLURM_STEP_NODELIST"])
        per_node = expand_repeated(variables["SLURM_STEP_TASKS_PER_NODE"])
        ports = _slurm_ports(variables, sizes)
    except (KeyError, ValueError) as exc:
        reject(
            f"Slurm's variables describe no step ({type(exc).__name__}: {exc})",
            "SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST and "
            "SLURM_STEP_TASKS_PER_NODE, as `srun` sets them",
            {name: text for name, text in variables.items() if name.startswith("SLURM_STEP")},
            source=source,
        )
    if len(nodes) != len(per_node) or sum(per_node) != num_tasks:
        reject(
            "Slurm's variables disagree",
            f"tasks for each of {len(nodes)} nodes, {num_tasks} in all",
            per_node,
            source=source,
        )
    is_cyclic = variables.get("SLURM_DISTRIBUTION", "block").startswith("cyclic")
    places = _cyclic(per_node) if is_cyclic else _blocks(per_node)
    hosts = [f"{nodes[node]}:{ports[local]}" for node, local in places]
    return by_rank(hosts, rank, sizes, source=source)


def from_sagemaker(variables: Mapping[str, str], sizes: Sizes) -> ClusterDescription | None:
    """Return the cluster of SageMaker's hosts: the first is the chief, the next ones are the ps."""
    text, current = variables.get("SM_HOSTS"), variables.get("SM_CURRENT_HOST")
    if not text or not current:
        return None
    try:
        names = json.loads(text)
        rank = names.index(current)
    except (ValueError, AttributeError):
        reject(
            "SM_HOSTS does not list this host",
            'a JSON list with the text of SM_CURRENT_HOST, such as ["algo-1", "algo-2"]',
            f"SM_HOSTS={text!r}, SM_CURRENT_HOST={current!r}",
            source="SM_HOSTS",
        )
    hosts = [f"{name}:{sizes.port or 2222}" for name in names]
    return by_rank(hosts, rank, sizes, source="SM_HOSTS")


def by_rank(hosts: Sequence[str], rank: int, sizes: Sizes, *, source: str) -> ClusterDescription:
    """Return the cluster of a list of nodes: the chief, the ps, and then the workers."""
    jobs = split_by_rank(hosts, sizes, source=source)
    first_worker = 1 + len(jobs["ps"])
    if rank == 0:
        return checked_cluster(jobs, "chief", 0, source=source)
    if rank < first_worker:
        return checked_cluster(jobs, "ps", rank - 1, source=source)
    return checked_cluster(jobs, "worker", rank - first_worker, source=source)


def split_by_rank(hosts: Sequence[str], sizes: Sizes, *, source: str) -> dict[str, list[str]]:
    """Return the jobs of a list of nodes: the chief, the ps, and then the workers.

    Arguments and errors are those of `by_rank`.
    """
    first_worker = 1 + sizes.num_ps
    num_workers = len(hosts) - first_worker
    wanted = sizes.num_workers
    if num_workers < 1 or (wanted is not None and wanted != num_workers):
        expected = f"1 chief, {sizes.num_ps} ps and {wanted or 'at least 1'} workers"
        reject(
            f"The number of nodes in {source} does not fit the number of tasks",
            f"{expected}: one node or task of the scheduler for each",
            f"{len(hosts)} nodes",
            source=source,
            advice="Ask the scheduler for more tasks, or set --num-ps and --num-workers. ",
        )
    ps, workers = hosts[1:first_worker], hosts[first_worker:]
    return {"chief": list(hosts[:1]), "ps": list(ps), "worker": list(workers)}


def _slurm_ports(variables: Mapping[str, str], sizes: Sizes) -> Sequence[int]:
    """Return the ports of the tasks on one node, in the order of their numbers there."""
    reserved = variables.get("SLURM_STEP_RESV_PORTS")
    if reserved and sizes.port is None:
        return [int(port) for port in expand_hostlist(f"[{reserved}]")]
    job = int(variables.get("SLURM_JOB_ID", "0"))
    first = sizes.port or _FIRST_PORT + job * _PORTS_OF_JOB % _NUM_PORTS
    return range(first, 65536)


def _blocks(per_node: Sequence[int]) -> list[tuple[int, int]]:
    """Return the node and the number on that node of each rank, node by node."""
    return [(node, local) for node, num in enumerate(per_node) for local in range(num)]


def _cyclic(per_node: Sequence[int]) -> list[tuple[int, int]]:
    """Return the node and the number on that node of each rank, in turns over the nodes."""
    rounds = range(max(per_node, default=0))
    return [(node, local) for local in rounds for node, num in enumerate(per_node) if local < num]
