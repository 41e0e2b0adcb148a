"""Files under `deploy/`: published schemas allow them, and they agree with each other and with
`kerasps run`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
import yaml

from support.documentation import code_blocks, command_parsers, commands_in, page_text, run_example
from support.manifests import (
    CHECKOUT,
    KUBERNETES,
    container_of,
    errors_of,
    jobs_of,
    kustomized,
    matches,
    of_kind,
    pod_spec,
    pods_of,
    read,
)

PORT = 2222
OVERLAYS = ("base", "overlays/cpu", "overlays/gpu-workers")
FILES = sorted(
    path.relative_to(KUBERNETES)
    for path in KUBERNETES.rglob("*.yaml")
    if path.name not in ("kustomization.yaml", "names.yaml")
)
PAGE = page_text("deploy")
DOCKERFILE = (CHECKOUT / "deploy" / "Dockerfile").read_text()
SBATCH = CHECKOUT / "deploy" / "slurm" / "train.sbatch"
# What `kerasps run` ends with: errors of the user, and what a scheduler may try again.
PERMANENT, PASSING = {1, 2}, {137, 138, 143}
RUN_OF = {
    "base": (2, 2),
    "overlays/cpu": (4, 2),
    "overlays/gpu-workers": (2, 2),
    "trainer": (4, 2),
}


def jobset_of(run):
    """The name and the spec of a JobSet: that of an overlay, or what Trainer makes one from."""
    if run == "trainer":
        (runtime,) = read(KUBERNETES / "trainer/runtime.yaml")
        (job,) = of_kind(read(KUBERNETES / "trainer/trainjob.yaml"), "TrainJob")
        assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        return job["metadata"]["name"], runtime["spec"]["template"]["spec"]
    (jobset,) = of_kind(kustomized(run), "JobSet")
    return jobset["metadata"]["name"], jobset["spec"]


def documents_of(run):
    return read(KUBERNETES / "trainer/trainjob.yaml") if run == "trainer" else kustomized(run)


def options_of(command):
    """What `kerasps run` understands of a command, of which `kerasps run` is the beginning."""
    assert command[:2] == ["kerasps", "run"]
    return command_parsers()["run"].parse_args(command[2:])


each_run = pytest.mark.parametrize("run", RUN_OF)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_schema_of_its_kind_allows_a_document(path):
    for document in read(KUBERNETES / path):
        assert errors_of(document) == []


@pytest.mark.parametrize("folder", OVERLAYS)
def test_schemas_allow_what_an_overlay_gives(folder):
    for document in kustomized(folder):
        assert errors_of(document) == []


@each_run
def test_as_many_tasks_run_as_each_of_them_is_told(run):
    name, spec = jobset_of(run)
    num_workers, num_ps = RUN_OF[run]
    counts = {job: found["replicas"] for job, found in jobs_of(spec).items()}
    assert counts == {"chief": 1, "ps": num_ps, "worker": num_workers}
    for _, _, _, environment in pods_of(name, spec):
        told = environment["KERASPS_NUM_WORKERS"], environment["KERASPS_NUM_PS"]
        assert told == (str(num_workers), str(num_ps))
    for job in spec["replicatedJobs"]:
        # Each task is a Job with one pod: it is restarted alone, and keeps its name.
        job_spec = job["template"]["spec"]
        assert job_spec.get("completions", 1) == job_spec.get("parallelism", 1) == 1
        assert job_spec.get("completionMode", "Indexed") == "Indexed"


@each_run
def test_only_pods_of_the_run_reach_its_port(run):
    name, spec = jobset_of(run)
    (policy,) = of_kind(documents_of(run), "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    ((rule,), (ours, theirs)) = (
        policy["spec"]["ingress"],
        [[*pods_of(of, spec)] for of in (name, f"{name}-other")],
    )
    (source,) = rule["from"]
    assert [*source] == ["podSelector"]
    assert rule["ports"] == [{"protocol": "TCP", "port": PORT}]
    for selector in (policy["spec"]["podSelector"], source["podSelector"]):
        assert all(matches(selector, labels) for _, _, labels, _ in ours)
        assert not any(matches(selector, labels) for _, _, labels, _ in theirs)


def test_the_page_opens_the_port_of_metrics_of_the_chief_alone():
    (policy,) = map(yaml.safe_load, code_blocks(PAGE, "yaml"))
    assert errors_of(policy) == []
    name, spec = jobset_of("overlays/cpu")
    selector = policy["spec"]["podSelector"]
    pods = [(role, labels) for role, _, labels, _ in pods_of(name, spec)]
    assert {role for role, labels in pods if matches(selector, labels)} == {"chief"}
    ((rule,), (port,)) = policy["spec"]["ingress"], policy["spec"]["ingress"][0]["ports"]
    assert [*rule["from"][0]] == ["namespaceSelector"]
    monitor = f'ClusterMonitor(port={port["port"]}, host="0.0.0.0")'
    assert monitor in PAGE
    assert port["port"] != PORT


@pytest.mark.parametrize("run", OVERLAYS)
def test_a_drain_waits_for_chief_and_ps_alone(run):
    name, spec = jobset_of(run)
    budgets = of_kind(kustomized(run), "PodDisruptionBudget")
    held = {}
    for budget in budgets:
        roles = [
            role
            for role, _, labels, _ in pods_of(name, spec)
            if matches(budget["spec"]["selector"], labels)
        ]
        assert len(set(roles)) == 1
        assert budget["spec"]["minAvailable"] == len(roles)
        held[roles[0]] = len(roles)
    assert held == {"chief": 1, "ps": RUN_OF[run][1]}


@each_run
def test_ports_are_the_same_everywhere(run):
    for job in jobset_of(run)[1]["replicatedJobs"]:
        (port,) = container_of(job)["ports"]
        assert port["containerPort"] == PORT
    assert re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE) == [str(PORT)]


@each_run
def test_losses_are_handled_by_who_was_lost(run):
    _, spec = jobset_of(run)
    jobs = jobs_of(spec)
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["chief"]}
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    rules = spec["failurePolicy"]["rules"]
    names = [rule["name"] for rule in rules]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", name) for name in names)

    def action(role, reason):
        """The first rule that fits is the one that JobSet obeys."""
        return next(
            rule["action"]
            for rule in rules
            if role in rule.get("targetReplicatedJobs", jobs)
            and reason in rule.get("onJobFailureReasons", [reason])
        )

    for role, job in jobs.items():
        job_spec = job["template"]["spec"]
        # Kubernetes asks for it where exit codes are read.
        assert pod_spec(job)["restartPolicy"] == "Never"
        assert job_spec["backoffLimit"] == 0
        codes = set()
        for rule in job_spec["podFailurePolicy"]["rules"]:
            if rule["action"] == "FailJob":
                assert rule["onExitCodes"]["containerName"] == container_of(job)["name"]
                codes |= set(rule["onExitCodes"]["values"])
            else:
                assert (role, rule["action"]) == ("worker", "Ignore")
        assert codes >= PERMANENT
        assert not codes & PASSING
        assert action(role, "PodFailurePolicy") == "FailJobSet"
        lost = "RestartJob" if role == "worker" else "RestartJobSet"
        assert action(role, "BackoffLimitExceeded") == lost


@each_run
def test_containers_have_no_more_rights_than_they_need(run):
    (user,) = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    for job in jobset_of(run)[1]["replicatedJobs"]:
        pod, container = pod_spec(job), container_of(job)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == int(user)
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        # Where nothing can be written but there, Keras and Python's temporary files are there.
        assert {"name": "HOME", "value": "/tmp"} in container["env"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert "emptyDir" in volumes[mounted["/tmp"]]
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("run", OVERLAYS)
def test_what_pods_name_is_there(run):
    documents = kustomized(run)
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    for job in jobset_of(run)[1]["replicatedJobs"]:
        pod, container = pod_spec(job), container_of(job)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == {*volumes}
        assert ("ConfigMap", volumes["script"]["configMap"]["name"]) in names
        if "checkpoints" in volumes:
            claim = volumes["checkpoints"]["persistentVolumeClaim"]["claimName"]
            assert ("PersistentVolumeClaim", claim) in names
        if "priorityClassName" in pod:
            assert ("PriorityClass", pod["priorityClassName"]) in names
    (script,) = of_kind(documents, "ConfigMap")
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == "script")
    assert mount["mountPath"] == container["workingDir"]
    assert options_of(container["command"]).script in script["data"]


def test_workers_with_gpus_are_on_nodes_that_may_go_and_others_are_not():
    jobs = jobs_of(jobset_of("overlays/gpu-workers")[1])
    assert container_of(jobs["worker"])["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container_of(jobs["worker"])["image"].endswith("-gpu")
    assert pod_spec(jobs["worker"])["nodeSelector"]
    for role in ("chief", "ps"):
        assert "nvidia.com/gpu" not in container_of(jobs[role])["resources"]["limits"]
        assert container_of(jobs[role])["image"].endswith("-cpu")
        assert "tolerations" not in pod_spec(jobs[role])


@each_run
def test_each_pod_runs_what_kerasps_run_understands(run):
    for job in jobset_of(run)[1]["replicatedJobs"]:
        container = container_of(job)
        options = options_of([*container["command"], *container.get("args", [])])
        assert options.script == "train.py"


def test_a_train_job_fits_its_runtime():
    (runtime,) = read(KUBERNETES / "trainer/runtime.yaml")
    (train_job,) = of_kind(read(KUBERNETES / "trainer/trainjob.yaml"), "TrainJob")
    step = "trainer.kubeflow.org/trainjob-ancestor-step"
    jobs = jobs_of(runtime["spec"]["template"]["spec"])
    trained = [
        job
        for job in jobs.values()
        if job["template"].get("metadata", {}).get("labels", {}).get(step) == "trainer"
    ]
    # What Trainer's webhook asks of the step: one Job, and a container of this name.
    assert trained == [jobs["chief"]]
    assert trained[0]["replicas"] == runtime["spec"]["mlPolicy"]["numNodes"] == 1
    assert container_of(jobs["chief"])["name"] == "node"
    assert "numNodes" not in train_job["spec"]["trainer"]
    claims = {
        document["metadata"]["name"]
        for document in of_kind(read(KUBERNETES / "trainer/trainjob.yaml"), "PersistentVolumeClaim")
    }
    for patch in train_job["spec"]["runtimePatches"]:
        for patched in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            spec = patched["template"]["spec"]["template"]["spec"]
            (container,) = spec["containers"]
            assert container["name"] == container_of(jobs[patched["name"]])["name"]
            # Those of `node` come from `trainer.env` alone.
            assert "env" not in container
            for volume in spec["volumes"]:
                claim = volume.get("persistentVolumeClaim")
                assert claim is None or claim["claimName"] in claims


def test_the_image_has_an_extra_of_the_package_and_no_root():
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extra = re.search(r'gpu\) extra="\[(\w+)\]"', DOCKERFILE).group(1)
    assert extra in project["optional-dependencies"]
    instructions = re.findall(r"^[A-Z]+", DOCKERFILE, re.MULTILINE)
    assert instructions.index("USER") > max(
        number for number, instruction in enumerate(instructions) if instruction == "RUN"
    )


def test_the_batch_script_asks_for_as_many_tasks_as_it_explains():
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    text = SBATCH.read_text()
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SBATCH)], check=True)
    chiefs, num_ps, num_workers = map(int, re.search(r"here (\d+), (\d+) and (\d+)", text).groups())
    ntasks = int(re.search(r"^#SBATCH --ntasks=(\d+)$", text, re.MULTILINE).group(1))
    assert ntasks == chiefs + num_ps + num_workers
    assert f"NUM_PS=${{NUM_PS:-{num_ps}}}" in text
    (command,) = re.findall(r"^ +(kerasps run .*)$", text, re.MULTILINE)
    command = shlex.split(command.replace('"$NUM_PS"', str(num_ps)).replace('"$@"', "train.py"))
    options = options_of(command)
    assert (options.num_ps, options.script) == (num_ps, "train.py")


@pytest.mark.parametrize("words", [*commands_in(PAGE)], ids=" ".join)
def test_a_command_of_the_page_names_what_there_is(words):
    for word in words:
        if word.startswith("deploy/"):
            assert (CHECKOUT / word).exists()
        if word.startswith("train-"):
            assert word == "train-script" or word == jobset_of("overlays/cpu")[0]


def test_the_number_of_ps_is_worked_out_as_the_page_says(capsys):
    output = [text for text in code_blocks(PAGE, "") if " ps\n" in text][-1]
    run_example("deploy")
    assert capsys.readouterr().out == output


def test_the_table_of_overlays_is_that_of_the_overlays():
    for run in OVERLAYS[1:]:
        (row,) = re.findall(rf"^\| `deploy/kubernetes/{run}` \|(.*)\|$", PAGE, re.MULTILINE)
        counts = tuple(int(re.match(r" (\d+)", cell).group(1)) for cell in row.split("|"))
        num_workers, num_ps = RUN_OF[run]
        assert counts == (1, num_ps, num_workers)
