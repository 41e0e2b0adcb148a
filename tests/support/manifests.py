"""The documents of `deploy/kubernetes`, the schemas for them, and the pods that a JobSet makes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

CHECKOUT = Path(__file__).parents[2]
KUBERNETES = CHECKOUT / "deploy" / "kubernetes"
SCHEMAS = json.loads((CHECKOUT / "tests" / "schemas" / "kinds.json").read_text())
FIELD = re.compile(r"metadata\.annotations\['(.+)'\]")


def read(path):
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def kustomized(folder):
    """The documents that `kubectl apply -k` applies."""
    kubectl, kustomize = shutil.which("kubectl"), shutil.which("kustomize")
    if kubectl is None and kustomize is None:
        pytest.skip("There is neither kubectl nor kustomize here.")
    command = [kubectl, "kustomize"] if kubectl else [kustomize, "build"]
    done = subprocess.run(
        [*command, str(KUBERNETES / folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def errors_of(document):
    """What a document has that the published schema of its kind does not allow."""
    schema = SCHEMAS["kinds"][f"{document['apiVersion']}/{document['kind']}"]
    validator = jsonschema.Draft202012Validator(schema | {"$defs": SCHEMAS["$defs"]})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def of_kind(documents, kind):
    return [document for document in documents if document["kind"] == kind]


def jobs_of(jobset_spec):
    """The replicated jobs by name."""
    return {job["name"]: job for job in jobset_spec["replicatedJobs"]}


def pod_spec(job):
    return job["template"]["spec"]["template"]["spec"]


def container_of(job):
    (container,) = pod_spec(job)["containers"]
    return container


def pods_of(name, jobset_spec):
    """The pods that JobSet and Kubernetes make: host name, labels and environment of each.

    JobSet gives labels and annotations, the controller of Jobs the completion index.
    """
    for job in jobset_spec["replicatedJobs"]:
        template = job["template"]["spec"]["template"]
        for index in range(job["replicas"]):
            given = {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
                "jobset.sigs.k8s.io/job-index": str(index),
            }
            environment = {"JOB_COMPLETION_INDEX": "0"}
            for variable in container_of(job)["env"]:
                if "value" in variable:
                    environment[variable["name"]] = variable["value"]
                else:
                    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                    environment[variable["name"]] = given[FIELD.fullmatch(path).group(1)]
            hostname = f"{name}-{job['name']}-{index}-0"
            labels = template.get("metadata", {}).get("labels", {}) | given
            yield job["name"], hostname, labels, environment


def matches(selector, labels):
    return selector["matchLabels"].items() <= labels.items()
