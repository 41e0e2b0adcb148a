"""TF_CONFIG in the forms that schedulers write it, and what each gives."""

import json

import pytest

from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.server import check_can_serve
from kerasps.errors import ClusterConfigError

CHIEF, WORKERS, PS = ["chief:1"], ["w0:1", "w1:1"], ["ps0:1", "ps1:1"]
JOBS = {"chief": CHIEF, "worker": WORKERS, "ps": PS}
WITHOUT_CHIEF = {"worker": WORKERS, "ps": PS}
VERTEX = {"environment": "cloud", "job": {"python_module": ""}}


def config(cluster, task_type, index=0, **more):
    task = {"type": task_type, "index": index, **more.pop("task", {})}
    return json.dumps({"cluster": cluster, "task": task, **more})


FORMS = {
    "TFJob": (config(JOBS, "worker", 1, environment="cloud"), {}, ("worker", 1), JOBS),
    "TFJob's evaluator": (
        config({**JOBS, "evaluator": ["e:1"]}, "evaluator"),
        {},
        ("evaluator", 0),
        JOBS,
    ),
    "Volcano and DLRover list the evaluator": (
        config({"evaluator": ["e:1"], "ps": PS, "worker": WORKERS, "chief": CHIEF}, "chief"),
        {},
        ("chief", 0),
        JOBS,
    ),
    "AI Platform and SageMaker say master": (
        config({"master": CHIEF, **WITHOUT_CHIEF}, "master", **VERTEX),
        {},
        ("chief", 0),
        JOBS,
    ),
    "a master beside an empty chief": (
        config({"master": CHIEF, "chief": [], **WITHOUT_CHIEF}, "ps", 1),
        {},
        ("ps", 1),
        JOBS,
    ),
    "Vertex": (
        config(JOBS, "ps", 1, task={"trial": "3", "cloud": "c"}, **VERTEX),
        {},
        ("ps", 1),
        JOBS,
    ),
    "Vertex's evaluator is in no cluster": (
        config(JOBS, "evaluator", **VERTEX),
        {},
        ("evaluator", 0),
        JOBS,
    ),
    "Azure ML without a chief, its first worker": (
        config(WITHOUT_CHIEF, "worker"),
        {"KERASPS_CHIEF": "worker:0"},
        ("chief", 0),
        {"chief": ["w0:1"], "worker": ["w1:1"], "ps": PS},
    ),
    "Azure ML without a chief, another worker": (
        config(WITHOUT_CHIEF, "worker", 1),
        {"KERASPS_CHIEF": "worker:0"},
        ("worker", 0),
        {"chief": ["w0:1"], "worker": ["w1:1"], "ps": PS},
    ),
    "a worker before the one that is the chief": (
        config(WITHOUT_CHIEF, "worker", 0),
        {"KERASPS_CHIEF": "worker:1"},
        ("worker", 0),
        {"chief": ["w1:1"], "worker": ["w0:1"], "ps": PS},
    ),
    "an index in quotes": (config(JOBS, "worker", "1"), {}, ("worker", 1), JOBS),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_gives_the_task_and_all_jobs(name, monkeypatch):
    text, variables, task, jobs = FORMS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    description = read_tf_config(text)
    assert (description.task_type, description.task_index) == task
    assert description.jobs == {job: tuple(tasks) for job, tasks in jobs.items()}


@pytest.mark.parametrize("index", [0, 3])
def test_a_dynamic_worker_serves_with_what_it_knows(index):
    text = config({"worker": {str(index): "w:1"}, "ps": PS}, "worker", index)
    description = read_tf_config(text, needs_chief=False, may_be_sparse=True)
    check_can_serve(description)
    assert description.address == "w:1"
    assert set(description.addresses) == {("worker", index), ("ps", 0), ("ps", 1)}
    assert description.as_cluster_spec()["worker"] == {index: "w:1"}


@pytest.mark.parametrize("index", [0, 1])
def test_a_ps_of_dynamic_workers_knows_itself_alone(index):
    text = config({"worker": {}, "ps": ["p:1"]}, "ps", index)
    description = read_tf_config(text, needs_chief=False, may_be_sparse=True)
    check_can_serve(description)
    assert description.addresses == {("ps", index): "p:1"}


REFUSED = {
    "the chief of dynamic workers": (
        config({"worker": {}, "ps": []}, "chief"),
        {},
        "enableDynamicWorker",
    ),
    "the chief of dynamic workers, without any job": (
        config({}, "chief"),
        {},
        "enableDynamicWorker",
    ),
    "Ray lists workers alone": (config({"worker": WORKERS}, "worker"), {}, "add ps tasks"),
    "KERASPS_CHIEF where there is one": (
        config(JOBS, "worker"),
        {"KERASPS_CHIEF": "worker:0"},
        "cluster that has a chief",
    ),
    "KERASPS_CHIEF of no worker": (
        config(WITHOUT_CHIEF, "ps"),
        {"KERASPS_CHIEF": "worker:2"},
        "N from 0 to 1",
    ),
    "KERASPS_CHIEF of a ps": (config(WITHOUT_CHIEF, "ps"), {"KERASPS_CHIEF": "ps:0"}, "worker:N"),
    "an index of a dynamic worker": (
        config({"worker": {"x": "w:1"}, "ps": PS}, "worker"),
        {"may_be_sparse": True},
        "sparse worker job",
    ),
    "a dynamic worker that is another": (
        config({"worker": {"3": "w:1"}, "ps": PS}, "worker", 1),
        {"may_be_sparse": True},
        "not in its cluster",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_with_the_setting(name, monkeypatch):
    text, arguments, words = REFUSED[name]
    if "KERASPS_CHIEF" in arguments:
        monkeypatch.setenv("KERASPS_CHIEF", arguments["KERASPS_CHIEF"])
        arguments = {}
    with pytest.raises(ClusterConfigError, match=words):
        read_tf_config(text, **arguments)
