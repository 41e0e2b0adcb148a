"""A node's place in a cluster, from what each platform sets."""

import json

import pytest

from kerasps.cluster.description.hostlist import expand_hostlist, expand_repeated
from kerasps.cluster.description.platforms import (
    Sizes,
    from_jobset,
    from_sagemaker,
    from_slurm,
    from_vertex,
)
from kerasps.errors import ClusterConfigError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[01-03,7],m", ["n01", "n02", "n03", "n7", "m"]),
        ("r[1-2]n[1-2]x", ["r1n1x", "r1n2x", "r2n1x", "r2n2x"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_a_hostlist_is_expanded_as_scontrol_does(text, names):
    assert expand_hostlist(text) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "[]"])
def test_no_hostlist(text):
    with pytest.raises(ValueError, match="no "):
        expand_hostlist(text)


def test_numbers_are_repeated():
    assert expand_repeated("2(x3),1") == [2, 2, 2, 1]


SLURM = {
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "7",
}


@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [
        ("block", ["n1:5000", "n1:5001", "n2:5000", "n2:5001", "n3:5000"]),
        ("cyclic:block", ["n1:5000", "n2:5000", "n3:5000", "n1:5001", "n2:5001"]),
    ],
)
def test_slurm(distribution, hosts):
    for rank, task in enumerate([("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]):
        variables = {**SLURM, "SLURM_PROCID": str(rank), "SLURM_DISTRIBUTION": distribution}
        found = from_slurm(variables, Sizes(num_ps=1, port=5000))
        assert (found.task_type, found.task_index) == task
        assert found.address == hosts[rank]
        assert [*found.jobs["chief"], *found.jobs["ps"], *found.jobs["worker"]] == hosts


def test_slurm_takes_the_ports_that_it_reserved():
    variables = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_RESV_PORTS": "12000-12001"}
    assert from_slurm(variables, Sizes()).jobs["ps"] == ("n1:12001",)


def test_jobset():
    found = from_jobset(
        {"JOB_COMPLETION_INDEX": "0"}, Sizes(num_ps=2, num_workers=3), "my-run-worker-2-0"
    )
    assert (found.task_type, found.task_index) == ("worker", 2)
    assert found.address == "my-run-worker-2-0.my-run:2222"
    assert found.jobs["chief"] == ("my-run-chief-0-0.my-run:2222",)
    assert len(found.jobs["ps"]) == 2


NAMES = {"JOBSET_NAME": "my-run", "REPLICATED_JOB_NAME": "ps", "JOB_INDEX": "1"}


@pytest.mark.parametrize(
    ("variables", "hostname"),
    [
        (NAMES, "some-host"),
        (NAMES | {"JOB_COMPLETION_INDEX": "0"}, "my-run-ps-1-0"),
        ({"JOBSET_NAME": "my-run"}, "my-run-ps-1-0.my-run.default.svc"),
        ({"JOB_COMPLETION_INDEX": "0"}, "my-run-ps-1-0"),
    ],
)
def test_a_pod_of_a_jobset_is_named_by_variables_or_by_its_host_name(variables, hostname):
    found = from_jobset(variables, Sizes(num_ps=2, num_workers=1), hostname)
    assert (found.task_type, found.task_index) == ("ps", 1)
    assert found.address == "my-run-ps-1-0.my-run:2222"


@pytest.mark.parametrize("job", ["trainer", "driver"])
def test_a_job_of_a_jobset_that_is_no_role_is_refused_with_the_name_to_give(job):
    with pytest.raises(ClusterConfigError, match=rf"{job}' of the JobSet .*script chief"):
        from_jobset(NAMES | {"REPLICATED_JOB_NAME": job}, Sizes(num_workers=1), f"a-{job}-0-0")


@pytest.mark.parametrize("change", [{"JOB_INDEX": "one"}, {"JOB_INDEX": ""}, {"JOBSET_NAME": ""}])
def test_variables_that_name_no_pod_of_a_jobset_are_refused(change):
    with pytest.raises(ClusterConfigError, match=r"do not name this pod\. Expected: .*Received: "):
        from_jobset(NAMES | change, Sizes(num_workers=1), "some-host")


def test_sagemaker():
    variables = {"SM_HOSTS": '["algo-1", "algo-2", "algo-3"]', "SM_CURRENT_HOST": "algo-3"}
    found = from_sagemaker(variables, Sizes())
    assert (found.task_type, found.task_index, found.address) == ("worker", 0, "algo-3:2222")


@pytest.mark.parametrize(
    ("pool", "task"),
    [
        ("workerpool0", "chief"),
        ("workerpool1", "worker"),
        ("workerpool2", "ps"),
        ("workerpool3", "evaluator"),
    ],
)
def test_vertex(pool, task):
    cluster = {f"workerpool{number}": [f"h{number}:2222"] for number in range(4)}
    spec = {"cluster": cluster, "environment": "cloud", "task": {"type": pool, "index": 0}}
    found = from_vertex({"CLUSTER_SPEC": json.dumps(spec)}, Sizes())
    assert (found.task_type, found.task_index) == (task, 0)
    assert found.jobs == {"chief": ("h0:2222",), "worker": ("h1:2222",), "ps": ("h2:2222",)}


@pytest.mark.parametrize(
    "find",
    [
        lambda: from_slurm({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, Sizes()),
        lambda: from_slurm({**SLURM, "SLURM_PROCID": "0"}, Sizes(num_ps=4)),
        lambda: from_slurm({**SLURM, "SLURM_PROCID": "x"}, Sizes()),
        lambda: from_jobset({"JOB_COMPLETION_INDEX": "0"}, Sizes(), "a-worker-0-0"),
        lambda: from_sagemaker({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, Sizes()),
        lambda: from_vertex({"CLUSTER_SPEC": "{}"}, Sizes()),
    ],
)
def test_variables_that_describe_no_cluster_are_refused(find):
    with pytest.raises(ClusterConfigError, match=r"Expected: .*Received: "):
        find()


def test_a_platform_that_is_not_there_gives_nothing():
    assert from_slurm({}, Sizes()) is None
    assert from_vertex({}, Sizes()) is None
    assert from_sagemaker({}, Sizes()) is None
    assert from_jobset({}, Sizes(), "host") is None
