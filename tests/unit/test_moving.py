"""The pages on moving: what they say of feature columns, of errors, and of a TFJob."""

from __future__ import annotations

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

import kerasps
from kerasps.cluster.description.platforms import Sizes
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.tools.cli.nodes.role import RoleOptions, find_role
from support.documentation import columns, errors_of_page, page_text
from support.manifests import KUBERNETES, container_of, jobs_of, pods_of, read

# Feature columns


def feature_columns():
    """Rows of the table of feature columns of which the page says that both sides are equal."""
    text = page_text("moving_from_estimator")
    rows = re.findall(r"^\| `(.+)` \| `(.+)` \| equal \|$", text, re.MULTILINE)
    assert len(rows) == text.count("| equal |")
    return rows


PEOPLE = {
    "age": tf.constant([[3.0], [18.0], [34.0], [35.0], [90.0]]),
    "day": tf.constant([[0], [6], [3], [2], [1]]),
    "color": tf.constant([["red"], ["green"], ["blue"], ["red"], ["blue"]]),
    "city": tf.constant([["Rome"], ["Oslo"], ["Lima"], ["Bonn"], ["Nice"]]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("before", "after"), feature_columns(), ids=lambda side: side.partition("(")[0]
)
def test_a_layer_computes_what_a_feature_column_does(before, after):
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras has the layer of feature columns")
    column = eval(before, {"fc": tf.feature_column})
    expected = tf_keras.layers.DenseFeatures([column])(PEOPLE)
    found = eval(after, {"layers": keras.layers, "x": PEOPLE})
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# Errors


def test_errors_of_the_page_on_estimators():
    def dataset():
        return tf.data.Dataset.range(3)

    messages = []
    for call in (
        lambda: tf.estimator,
        lambda: kerasps.TrainSpec(dataset, hooks=[]),
        lambda: kerasps.TrainSpec(dataset()),
    ):
        with pytest.raises((AttributeError, TypeError)) as caught:
            call()
        messages.append(str(caught.value))
    quoted = errors_of_page("moving_from_estimator")
    assert len(quoted) == len(messages)
    for quote, message in zip(quoted, messages, strict=True):
        assert quote in message


# A TFJob, and what takes its place


def tf_configs(tfjob, *, dynamic=False):
    """TF_CONFIG of each task, as `genTFConfigJSONStr` of Training Operator 1.9 writes it."""
    name, namespace = tfjob["metadata"]["name"], tfjob["metadata"]["namespace"]
    replicas = {
        kind.lower(): spec["replicas"] for kind, spec in tfjob["spec"]["tfReplicaSpecs"].items()
    }
    cluster = {
        job: [f"{name}-{job}-{index}.{namespace}.svc:2222" for index in range(number)]
        for job, number in replicas.items()
    }
    for job, number in replicas.items():
        for index in range(number):
            task = {"type": job, "index": index}
            known = {"worker": {}, "ps": []} if dynamic else cluster
            yield json.dumps({"cluster": known, "task": task, "environment": "cloud"})


@pytest.fixture
def tfjob():
    (text,) = columns("moving_from_tfjob", "yaml")["before"]
    return yaml.safe_load(text)


def shown_jobset():
    (text,) = columns("moving_from_tfjob", "yaml")["after"]
    return yaml.safe_load(text)


def missing_in(shown, whole, path=""):
    """Paths of what one document has and another has not; items of lists are found by name."""
    if isinstance(shown, dict) and isinstance(whole, dict):
        for key, value in shown.items():
            yield from missing_in(value, whole.get(key), f"{path}.{key}")
    elif isinstance(shown, list) and shown and isinstance(shown[0], dict) and whole:
        for item in shown:
            found = [other for other in whole if other.get("name") == item.get("name")]
            yield from missing_in(item, next(iter(found), None), f"{path}.{item.get('name')}")
    elif shown != whole:
        yield path


def test_the_jobset_of_the_page_is_in_the_base():
    (base,) = read(KUBERNETES / "base" / "jobset.yaml")
    assert list(missing_in(shown_jobset(), base)) == []
    other = shown_jobset()
    other["spec"]["replicatedJobs"][1]["replicas"] = 3
    assert list(missing_in(other, base)) == [".spec.replicatedJobs.ps.replicas"]


def test_both_start_the_same_tasks_with_the_same_command(tfjob):
    (base,) = read(KUBERNETES / "base" / "jobset.yaml")
    (runtime,) = read(KUBERNETES / "trainer" / "runtime.yaml")
    jobs, in_runtime = jobs_of(base["spec"]), jobs_of(runtime["spec"]["template"]["spec"])
    for kind, spec in tfjob["spec"]["tfReplicaSpecs"].items():
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"  # the operator looks for it
        assert container["command"] == container_of(jobs[kind.lower()])["command"]
        assert spec["replicas"] == jobs[kind.lower()]["replicas"]
        theirs = container_of(in_runtime[kind.lower()])
        assert container["command"] == [*theirs["command"], *theirs["args"]]
    assert len(jobs) == len(in_runtime) == len(tfjob["spec"]["tfReplicaSpecs"])


def test_kerasps_reads_the_same_cluster_from_both(tfjob):
    before = [read_tf_config(text) for text in tf_configs(tfjob)]
    (base,) = read(KUBERNETES / "base" / "jobset.yaml")
    after = []
    for _, hostname, _, environment in pods_of(base["metadata"]["name"], base["spec"]):
        sizes = Sizes(
            num_workers=int(environment["KERASPS_NUM_WORKERS"]),
            num_ps=int(environment["KERASPS_NUM_PS"]),
        )
        role = find_role(RoleOptions(sizes=sizes), environment, hostname)
        after.append(role.description)
    for descriptions in (before, after):
        assert all(description.jobs == descriptions[0].jobs for description in descriptions)
    tasks = [{(found.task_type, found.task_index) for found in side} for side in (before, after)]
    assert tasks[0] == tasks[1]
    assert len(tasks[0]) == len(before) == len(after) == 5
    for description in before:
        task = f"train-{description.task_type}-{description.task_index}"
        assert description.address == f"{task}.default.svc:2222"
    for description in after:
        task = f"train-{description.task_type}-{description.task_index}"
        assert description.address == f"{task}-0.train:2222"


def test_an_evaluator_of_a_tfjob_is_in_no_cluster(tfjob):
    specs = tfjob["spec"]["tfReplicaSpecs"]
    specs["Evaluator"] = {**specs["Chief"]}
    descriptions = [read_tf_config(text) for text in tf_configs(tfjob)]
    assert {job for found in descriptions for job in found.jobs} == {"chief", "ps", "worker"}
    assert descriptions[-1].task_type == "evaluator"


def test_errors_of_the_page_on_tfjobs(tfjob):
    dynamic = next(tf_configs(tfjob, dynamic=True))
    del tfjob["spec"]["tfReplicaSpecs"]["Chief"]
    quoted = errors_of_page("moving_from_tfjob")
    for text, quote in zip((dynamic, next(tf_configs(tfjob))), quoted, strict=True):
        with pytest.raises(kerasps.ClusterConfigError, match=re.escape(quote)):
            read_tf_config(text)
