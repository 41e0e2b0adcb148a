"""Which task a node of `kerasps run` is, by what options and platforms say."""

import json
import os
import subprocess
import sys

import pytest

from kerasps.cluster.description.platforms import Sizes
from kerasps.errors import ClusterConfigError
from kerasps.tools.cli.nodes.role import RoleOptions, find_role

HOSTNAME = "host-of-this-test"
JOBS = {"chief": ["h0:2222"], "worker": ["h3:2222", "h4:2222"], "ps": ["h1:2222", "h2:2222"]}
TF_CONFIG = json.dumps({"cluster": JOBS, "task": {"type": "ps", "index": 1}})
VERTEX = json.dumps(
    {
        "cluster": {
            "workerpool0": ["v0:2222"],
            "workerpool1": ["v1:2222"],
            "workerpool2": ["v2:1"],
        },
        "task": {"type": "workerpool1", "index": 0},
    }
)
JOBSET = {"JOB_COMPLETION_INDEX": "0", "JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "worker"}
SLURM = {
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2", "algo-3"]', "SM_CURRENT_HOST": "algo-3"}
# From the last to the first in the order of those that are looked at.
SOURCES = [
    ("SageMaker", SAGEMAKER, {}, ("worker", 0), "algo-3:2222"),
    ("Slurm", SLURM, {}, ("chief", 0), "n1:10448"),
    ("JobSet", JOBSET, {}, ("worker", 1), "run-worker-1-0.run:2222"),
    ("Vertex", {"CLUSTER_SPEC": VERTEX}, {}, ("worker", 0), "v1:2222"),
    ("TF_CONFIG", {"TF_CONFIG": TF_CONFIG}, {}, ("ps", 1), "h2:2222"),
    ("--hosts", {}, {"role": "worker", "hosts": "chief=a;ps=b;worker=c"}, ("worker", 0), "c:2222"),
]


def found(variables=None, hostname=HOSTNAME, sizes=None, **options):
    sizes = sizes or Sizes(num_workers=None)
    return find_role(RoleOptions(sizes=sizes, **options), variables or {}, hostname)


def test_the_first_source_that_has_a_role_is_taken():
    variables, options = {}, {}
    for source, more, more_options, task, address in SOURCES:
        variables |= more
        options |= more_options
        sizes = Sizes(num_workers=2) if source == "JobSet" else Sizes()
        role = found(variables, "run-worker-1-0", sizes, **options)
        assert source in str(role)
        description = role.description
        assert (description.task_type, description.task_index) == task
        assert description.address == address
        assert f"this is {task[0]} {task[1]} of 1 chief, " in str(role)


def test_a_node_without_a_role_is_told_what_was_looked_at():
    with pytest.raises(ClusterConfigError) as caught:
        found({"SLURM_JOB_ID": "7"})
    for name in ("--hosts", "TF_CONFIG", "CLUSTER_SPEC", "JobSet", "SLURM_PROCID", "SM_HOSTS"):
        assert name in str(caught.value)
    assert HOSTNAME in str(caught.value)
    assert "start this command with `srun`" in str(caught.value)


@pytest.mark.parametrize(
    "hosts",
    [
        "chief=h0;ps=h1,h2;worker=h3,h4",
        " chief = h0 ; ps=h1, h2 ;worker=h3,h4 ",
        "worker=h3,h4;ps=h1,h2;master=h0;evaluator=h9",
        json.dumps({job: [h.removesuffix(":2222") for h in tasks] for job, tasks in JOBS.items()}),
        '{"chief": "h0", "ps": "h1,h2", "worker": ["h3:2222", "h4"]}',
        "h0,h1,h2,h3,h4",
    ],
)
def test_forms_of_hosts(hosts):
    for job, tasks in JOBS.items():
        for index, address in enumerate(tasks):
            role = found(hosts=hosts, role=job, index=index, sizes=Sizes(num_ps=2))
            assert role.description.address == address
            assert {job: [*tasks] for job, tasks in role.description.jobs.items()} == JOBS


def test_an_evaluator_is_no_part_of_the_cluster():
    description = found(hosts="chief=a;ps=b;worker=c;evaluator=d", role="evaluator").description
    assert description.task_type == "evaluator"
    assert description.address is None
    assert set(description.jobs) == {"chief", "ps", "worker"}


def test_tasks_of_one_host_have_ports_in_turn():
    description = found(
        hosts="chief=a;ps=a,a:9000,b;worker=::1,[::2]:7", role="chief", sizes=Sizes(port=5000)
    ).description
    assert description.jobs == {
        "chief": ("a:5000",),
        "worker": ("[::1]:5000", "[::2]:7"),
        "ps": ("a:5001", "a:9000", "b:5000"),
    }


def test_a_node_finds_itself_among_the_hosts():
    hosts = f"chief=a.invalid;ps={HOSTNAME}.domain;worker=c.invalid"
    description = found(hosts=hosts).description
    assert (description.task_type, description.task_index) == ("ps", 0)
    description = found(hosts="chief=a.invalid;ps=b.invalid;worker=127.0.0.1").description
    assert (description.task_type, description.task_index) == ("worker", 0)


def test_a_worker_is_the_chief_where_none_is_listed():
    variables = {"KERASPS_CHIEF": "worker:0"}
    for task, expected in (("worker", 0), ("chief", 0)), (("worker", 1), ("worker", 0)):
        role, index = task
        description = found(variables, hosts="ps=b;worker=c,d", role=role, index=index).description
        assert (description.task_type, description.task_index) == expected
        assert description.jobs == {"chief": ("c:2222",), "worker": ("d:2222",), "ps": ("b:2222",)}


def test_options_name_the_task_of_a_cluster_in_tf_config():
    role = found({"TF_CONFIG": json.dumps({"cluster": JOBS})}, role="worker", index=1)
    assert role.description.address == "h4:2222"
    assert "TF_CONFIG and --role" in str(role)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"role": "ps"}, "nothing lists the tasks of the cluster"),
        ({"index": 1}, "nothing lists the tasks of the cluster"),
        ({"hosts": ""}, "lists no hosts"),
        ({"hosts": "chief=a;ps=b;worker="}, "lists no hosts"),
        ({"hosts": "chief=a;ps=b;ps=c;worker=d"}, "lists no hosts"),
        ({"hosts": "chief=a;ps"}, "lists no hosts"),
        ({"hosts": '{"chief": 3}'}, "lists no hosts"),
        ({"hosts": "{"}, "lists no hosts"),
        ({"hosts": "a.invalid,b.invalid"}, "does not fit the number of tasks"),
        ({"hosts": "chief=a;ps=b;worker=c", "role": "worker", "index": 1}, "not in its cluster"),
        ({"hosts": "ps=b;worker=c", "role": "ps"}, "has no chief"),
        ({"hosts": "chief=a;boss=b;ps=c;worker=d", "role": "ps"}, "unknown jobs"),
        ({"hosts": "chief=a:x;ps=b;worker=c", "role": "ps"}, "malformed"),
        ({"hosts": "chief=a.invalid;ps=b.invalid;worker=c.invalid"}, "does not say which"),
        ({"hosts": "chief=127.0.0.1:1;ps=127.0.0.1:2;worker=127.0.0.1:3"}, "does not say which"),
    ],
)
def test_options_that_give_no_role_are_refused(options, words):
    with pytest.raises(ClusterConfigError, match=words) as caught:
        found(**options)
    for part in ("Expected: ", "Received: ", "--"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "hostname", "hint"),
    [
        ({"SLURM_JOB_ID": "7"}, "h", "start this command with `srun`"),
        (
            {"JOB_COMPLETION_INDEX": "0"},
            "my-run-trainer-0-0",
            "its job is called 'trainer': call the job that runs the script chief",
        ),
    ],
)
def test_a_node_without_a_role_gets_a_hint_on_its_scheduler(variables, hostname, hint):
    with pytest.raises(ClusterConfigError, match="This node has no role") as caught:
        find_role(RoleOptions(), variables, hostname)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "This node has no role"),
        (["--hosts", "chief=127.0.0.1", "--role", "chief"], "has no ps"),
        (["--role", "boss"], "invalid choice"),
        (["--hots", "x"], "Did you mean --hosts?"),
        (["--num-ps", "0"], "Not a count"),
        (["--hosts", "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", "--role", "evaluator"], "no such scri"),
    ],
)
def test_the_command_says_what_is_wrong(options, words, tmp_path):
    env = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    env.pop("TF_CONFIG", None)
    done = subprocess.run(
        [sys.executable, "-m", "kerasps", "run", *options, "no_script.py"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
