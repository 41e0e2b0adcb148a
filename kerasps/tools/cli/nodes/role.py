"""Finds the cluster and the task of this node, for `kerasps run`."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kerasps.cluster.description.checking import checked_cluster, reject
from kerasps.cluster.description.cluster_description import (
    EVALUATOR,
    TASK_TYPES,
    ClusterDescription,
)
from kerasps.cluster.description.forms import (
    named_as_here,
    with_names_of_here,
    with_worker_as_chief,
)
from kerasps.cluster.description.platforms import (
    Sizes,
    from_jobset,
    from_sagemaker,
    from_slurm,
    from_vertex,
    split_by_rank,
)
from kerasps.cluster.description.tf_config import CHIEF_VARIABLE, read_tf_config
from kerasps.cluster.serving.listen_address import is_of_this_machine
from kerasps.errors import ClusterConfigError

DEFAULT_PORT = 2222
_HOSTS = "--hosts"
# Between jobs: a semicolon, or a space before the next name.
_JOBS = re.compile(r"\s*;\s*|\s+(?=\w+\s*=)")
# JobSet's name for a pod; the name of the job is taken to be one word.
_POD_OF_SOME_JOB = re.compile(r".+-(?P<job>[a-z0-9]*[a-z][a-z0-9]*)-\d+-\d+")
_FORMS = (
    '"chief=h0;ps=h1,h2;worker=h3,h4", the same as JSON, or the list "h0,h1,h2,h3,h4": the chief, '
    "then the ps, then the workers"
)


@dataclass(frozen=True)
class RoleOptions:
    """The options of the command line about the roles of nodes."""

    role: str | None = None
    index: int | None = None
    hosts: str | None = None
    sizes: Sizes = field(default_factory=Sizes)
    needs_chief: bool = True


@dataclass(frozen=True)
class Role:
    """This node's place in a cluster, and the source that names it."""

    description: ClusterDescription
    source: str

    def __str__(self) -> str:
        description = self.description
        counts = {job: len(description.jobs.get(job, ())) for job in TASK_TYPES}
        words = [
            f"{number} {job}{'s' if job == 'worker' and number > 1 else ''}"
            for job, number in counts.items()
            if number
        ]
        among = ", ".join(words)
        at = "" if description.address is None else f", at {description.address}"
        this = f"{description.task_type} {description.task_index}"
        return f"this is {this} of {among}{at} ({self.source})"


def find_role(options: RoleOptions, variables: Mapping[str, str], hostname: str) -> Role:
    """Return this node's role, from the first source that has one.

    The order is: the options, TF_CONFIG, Vertex AI's CLUSTER_SPEC, the variables of JobSet, those
    of Slurm, those of SageMaker.
    """
    sizes = options.sizes
    if options.hosts is not None:
        return Role(_from_hosts(options.hosts, options, variables, hostname), "from --hosts")
    if variables.get("TF_CONFIG", "").strip():
        text = variables["TF_CONFIG"]
        if options.role is not None:
            text = _with_task(text, options)
        description = read_tf_config(text, needs_chief=options.needs_chief, may_be_sparse=True)
        return Role(description, "from TF_CONFIG" + (" and --role" if options.role else ""))
    if options.role is not None or options.index is not None:
        reject(
            "--role and --index name this task, but nothing lists the tasks of the cluster",
            f"{_HOSTS} with the hosts of all tasks, or TF_CONFIG",
            f"--role {options.role} --index {options.index}",
            source=_HOSTS,
            advice=f"Give {_HOSTS} {_FORMS}. ",
        )
    platforms: Sequence[tuple[Callable[[], ClusterDescription | None], str]] = (
        (lambda: from_vertex(variables, sizes), "from CLUSTER_SPEC, as Vertex AI sets it"),
        (lambda: from_jobset(variables, sizes, hostname), "from JobSet's variables"),
        (lambda: from_slurm(variables, sizes), "from Slurm's variables"),
        (lambda: from_sagemaker(variables, sizes), "from SM_HOSTS, as SageMaker sets it"),
    )
    for find, source in platforms:
        found = find()
        if found is not None:
            return Role(found, source)
    raise ClusterConfigError(
        "This node has no role. Expected: one of these sources, which kerasps tries in this order: "
        "--role, --index and --hosts; TF_CONFIG; CLUSTER_SPEC (Vertex AI); JOBSET_NAME, "
        "REPLICATED_JOB_NAME and JOB_INDEX, or JOB_COMPLETION_INDEX with a host name like "
        "<jobset>-ps-0-0 (JobSet); SLURM_STEP_NODELIST and SLURM_PROCID "
        "(Slurm, in a step of `srun`); SM_HOSTS and SM_CURRENT_HOST (SageMaker). Received: none of "
        f"them; the host name is {hostname!r}{_hint(variables, hostname)}. Give {_HOSTS} "
        f"{_FORMS}, on every node; or run everything on this machine with `kerasps launch`."
    )


def _hint(variables: Mapping[str, str], hostname: str) -> str:
    """Return a remedy, if a scheduler is there and lacks one thing."""
    if "SLURM_JOB_ID" in variables:
        return ", and there is a job of Slurm without a step: start this command with `srun`"
    pod = _POD_OF_SOME_JOB.fullmatch(hostname.partition(".")[0])
    if "JOB_COMPLETION_INDEX" in variables and pod is not None:
        return (
            f". If this is a pod of a JobSet, its job is called {pod['job']!r}: call the job that "
            "runs the script chief, and the others ps, worker and evaluator"
        )
    return ""


def _with_task(text: str, options: RoleOptions) -> str:
    """Return TF_CONFIG with the task that the options name."""
    try:
        config = json.loads(text)
        config["task"] = {"type": options.role, "index": options.index or 0}
    except (ValueError, TypeError):
        return text  # `read_tf_config` raises the error
    return json.dumps(config)


def _from_hosts(
    text: str, options: RoleOptions, variables: Mapping[str, str], hostname: str
) -> ClusterDescription:
    sizes = options.sizes
    hosts = _parsed(text)
    if isinstance(hosts, list):
        hosts = split_by_rank(hosts, sizes, source=_HOSTS)
    evaluators = hosts.get(EVALUATOR, [])
    jobs: dict[str, Any] = with_names_of_here(hosts, source=_HOSTS)
    with_all = _with_ports({**jobs, EVALUATOR: evaluators}, sizes.port or DEFAULT_PORT)
    evaluators = with_all.pop(EVALUATOR)
    role, index = named_as_here(options.role), options.index or 0
    if role is None:
        role, index = _place_here({**with_all, EVALUATOR: evaluators}, hostname)
    cluster = {job: tasks for job, tasks in with_all.items() if tasks}
    chief = variables.get(CHIEF_VARIABLE)
    if chief and not cluster.get("chief"):
        cluster, role, index = with_worker_as_chief(cluster, role, index, chief)  # type: ignore[assignment]
    return checked_cluster(cluster, role, index, source=_HOSTS, needs_chief=options.needs_chief)


def _parsed(text: str) -> dict[str, list[str]] | list[str]:
    """Return the hosts by job, or in their order."""
    stripped = text.strip()
    try:
        if stripped.startswith("{"):
            listed = json.loads(stripped)
            return {job: _listed(hosts) for job, hosts in listed.items()}
        if "=" in stripped:
            pairs = [part.partition("=") for part in _JOBS.split(stripped) if part]
            if len({job for job, _, _ in pairs}) < len(pairs) or not all(e for _, e, _ in pairs):
                raise ValueError("a job without hosts, or twice")
            return {job.strip(): _listed(hosts) for job, _, hosts in pairs}
        return _listed(stripped)
    except (ValueError, TypeError) as exc:
        reject(f"{_HOSTS} lists no hosts ({exc})", _FORMS, repr(text), source=_HOSTS)


def _listed(hosts: object) -> list[str]:
    if isinstance(hosts, str):
        hosts = [host.strip() for host in hosts.split(",")]
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise ValueError(f"no list of hosts: {hosts!r}")
    return hosts


def _with_ports(jobs: Mapping[str, Sequence[str]], port: int) -> dict[str, list[str]]:
    """Return addresses with ports: on each host the given one, then those that follow it."""
    used: Counter[str] = Counter()
    addresses: dict[str, list[str]] = {}
    for job, hosts in jobs.items():
        addresses[job] = []
        for host in hosts:
            is_ipv6 = host.count(":") > 1 and not host.startswith("[")
            name = f"[{host}]" if is_ipv6 else host
            if re.search(r":[0-9]+$", name) and not is_ipv6:
                addresses[job].append(name)
            else:
                addresses[job].append(f"{name}:{port + used[name]}")
                used[name] += 1
    return addresses


def _place_here(jobs: Mapping[str, Sequence[str]], hostname: str) -> tuple[str, int]:
    """Return the one task whose host is this machine."""
    here = [
        (job, index)
        for job, tasks in jobs.items()
        for index, address in enumerate(tasks)
        if is_of_this_machine(address, hostname)
    ]
    if len(here) != 1:
        tasks = ", ".join(f"{job} {index}" for job, index in here) or "none"
        reject(
            f"{_HOSTS} does not say which of its tasks this node is",
            "exactly one host that is this machine, or --role and --index",
            f"{tasks}; the host name is {hostname!r}",
            source=_HOSTS,
            advice="Give --role and --index. ",
        )
    return here[0]


def this_hostname() -> str:
    """Return the name of this machine."""
    return os.uname().nodename
