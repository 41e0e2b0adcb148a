"""Workflows, templates and hooks name what there is; releases need what the checklist says."""

from __future__ import annotations

import configparser
import importlib
import itertools
import re
import runpy
import shlex
import sys
import tomllib
import types

import pytest
import yaml

import kerasps
from kerasps import _compat
from support.documentation import CHECKOUT

WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((CHECKOUT / ".github" / "workflows").glob("*.yml"))
}
JOBS = {
    f"{name}-{job}": found
    for name, workflow in WORKFLOWS.items()
    for job, found in workflow["jobs"].items()
}
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", str(PROJECT["classifiers"]))
# What a command line may begin with, on a machine of GitHub's.
PROGRAMS = {"docker", "gh", "python", "tox"}
NOTES = runpy.run_path(str(CHECKOUT / ".ci" / "release_notes.py"))


def environments():
    """The names of all environments of tox, those with factors written out."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(CHECKOUT / "tox.ini")
    names = {"py"}
    for section in tox.sections():
        head, _, name = section.partition(":")
        if head == "testenv" and name:
            start, _, rest = name.partition("{")
            factors, _, end = rest.partition("}")
            names |= {f"{start}{factor}{end}" for factor in factors.split(",")}
    return names


def commands_of(job):
    """The commands of a job as lists of words, one for each choice of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    choices = [
        dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values())
    ]
    commands = []
    for step in job.get("steps", []):
        for chosen in choices:
            text = step.get("run", "")
            for key, value in chosen.items():
                text = text.replace(f"${{{{ matrix.{key} }}}}", value)
            commands += [shlex.split(line) for line in text.splitlines()]
    return commands


each_job = pytest.mark.parametrize("name", JOBS)


@each_job
def test_a_job_runs_what_there_is(name):
    for command in commands_of(JOBS[name]):
        assert command[0] in PROGRAMS
        if command[:3] == ["tox", "run", "-e"]:
            assert set(command[3].split(",")) <= environments(), command
        # `dist` and files of the runner's are made by the job.
        paths = [word for word in command if re.match(r"(tests|deploy|examples|\.ci)/", word)]
        assert [path for path in paths if not (CHECKOUT / path).exists()] == []
        if command[0] == "python" and command[1] != "-m":
            assert (CHECKOUT / command[1]).is_file()


@each_job
def test_a_job_ends(name):
    job = JOBS[name]
    if "uses" in job:
        assert (CHECKOUT / job["uses"]).is_file()
        return
    assert 0 < job["timeout-minutes"] <= 180
    assert job["runs-on"] == "ubuntu-latest"


@pytest.mark.parametrize("name", ["tests-fast", "tests-package", "release-package", "image-image"])
def test_every_python_of_the_classifiers_is_tried(name):
    assert JOBS[name]["strategy"]["matrix"]["python"] == PYTHONS


def test_every_folder_of_tests_runs_on_every_change():
    sessions = runpy.run_path(str(CHECKOUT / "tests" / "run.py"))["SESSIONS"]
    named = {
        word
        for job in WORKFLOWS["tests"]["jobs"].values()
        for command in commands_of(job)
        for word in command
        if word.startswith("tests/")
    }
    assert named == {f"tests/{folder}" for folders in sessions.values() for folder in folders}


def test_every_environment_that_tests_runs_somewhere():
    """But those that people call, that need a GPU, or that repeat a part of another one."""
    run = {
        name
        for job in JOBS.values()
        for command in commands_of(job)
        if command[:3] == ["tox", "run", "-e"]
        for name in command[3].split(",")
    }
    by_hand = {"fast", "full", "quickstart", "gpu", "bench"}
    factors = {name for name in environments() if name.startswith("package-")}
    assert environments() - run == by_hand | factors


def test_a_release_is_published_after_all_tests_of_these_files():
    jobs = WORKFLOWS["release"]["jobs"]
    assert WORKFLOWS["release"][True] == {"push": {"tags": ["v*"]}}
    assert jobs["tests"]["uses"] == "./.github/workflows/tests.yml"
    assert "workflow_call" in WORKFLOWS["tests"][True]
    assert set(jobs["publish"]["needs"]) == {"tests", "package"}
    assert (jobs["package"]["needs"], jobs["github"]["needs"]) == ("build", "publish")


def test_lint_checks_every_workflow():
    """Its schema by name; `zizmor` takes the folder."""
    lint = (
        (CHECKOUT / "tox.ini").read_text().partition("[testenv:lint]")[2].partition("[testenv")[0]
    )
    assert set(re.findall(r"\.github/workflows/(\w+)\.yml", lint)) == set(WORKFLOWS)


def test_hooks_before_a_commit_are_those_of_lint_and_types():
    hooks = yaml.safe_load((CHECKOUT / ".pre-commit-config.yaml").read_text())["repos"]
    found = {hook["id"]: hook for repository in hooks for hook in repository["hooks"]}
    assert set(found) == {"ruff-check", "ruff-format", "codespell", "mypy"}
    (command, _, _, environment) = found["mypy"]["entry"].split()
    assert (command, environment) == ("tox", "types")
    for repository in hooks:
        assert repository["repo"] == "local" or re.fullmatch(r"v\d+\.\d+\.\d+", repository["rev"])


@pytest.mark.parametrize("name", ["ISSUE_TEMPLATE/bug.md", "pull_request_template.md"])
def test_templates_ask_for_the_environment(name):
    assert "`kerasps env`" in (CHECKOUT / ".github" / name).read_text()


def test_actions_and_the_versions_in_the_image_are_kept_up_to_date():
    updates = yaml.safe_load((CHECKOUT / ".github" / "dependabot.yml").read_text())["updates"]
    kept = {(update["package-ecosystem"], update["directory"]) for update in updates}
    assert kept == {("github-actions", "/"), ("pip", "/deploy")}


def test_the_release_checklist_names_what_there_is():
    page = (CHECKOUT / "docs" / "releasing.md").read_text()
    named = [
        name
        for names in re.findall(r"tox (?:run )?-e ([\w,-]+)", page)
        for name in names.split(",")
    ]
    assert named
    assert set(named) <= environments()
    for name in re.findall(r"`(\w+)\.yml`", page):
        assert name in WORKFLOWS
    for path in re.findall(r"\.ci/\w+\.?\w*", page):
        assert (CHECKOUT / path).is_file()


CHANGELOG = """# Changelog

## 0.2.0 (2026-12-31)

- It is [new](docs/new.md).

## 0.1.0 (unreleased)

- [First](https://example.com).

## 0.0.1 (2026-01-01)

"""


def test_release_notes_are_the_section_of_the_version():
    assert NOTES["section_of"](CHANGELOG, "0.2.0") == "- It is [new](docs/new.md).\n"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.1.0", r"no date for 0.1.0. Expected: .*\. Received: `\(unreleased\)`"),
        ("0.0.1", "no section on 0.0.1"),
        ("0.3.0", "no section on 0.3.0"),
        ("0.2", "no section on 0.2"),
    ],
)
def test_there_are_no_release_notes_without_a_date_and_a_text(version, message):
    with pytest.raises(SystemExit, match=message):
        NOTES["section_of"](CHANGELOG, version)


def test_a_tag_is_the_version():
    with pytest.raises(SystemExit, match=r"The tag is not the version\. Expected: v"):
        NOTES["main"](["v99.0.0"])


# The package


def test_classifiers_begin_at_the_python_that_is_required():
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert PROJECT["license"] == "Apache-2.0"
    assert not any("License ::" in each for each in PROJECT["classifiers"])


def test_the_readme_of_pypi_has_no_link_into_the_checkout(monkeypatch):
    told = {}
    # Not every environment of the tests has setuptools.
    fake = types.SimpleNamespace(setup=lambda **arguments: told.update(arguments))
    monkeypatch.setitem(sys.modules, "setuptools", fake)
    runpy.run_path(str(CHECKOUT / "setup.py"))
    targets = re.findall(r"\]\(([^)]+)\)", told["long_description"])
    assert len(targets) > 30
    assert [target for target in targets if not target.startswith("https://")] == []
    assert told["long_description_content_type"] == "text/markdown"


# The image


def test_the_image_has_a_python_that_is_supported_and_a_command_that_is_installed():
    dockerfile = (CHECKOUT / "deploy" / "Dockerfile").read_text()
    (python,) = re.findall(r"^ARG PYTHON=(\S+)$", dockerfile, re.MULTILINE)
    (base,) = re.findall(r"^ARG BASE=(\S+)$", dockerfile, re.MULTILINE)
    assert python in PYTHONS
    assert base == "python:${PYTHON}-slim"
    assert re.findall(r"^FROM (\S+)$", dockerfile, re.MULTILINE) == ["${BASE}"]
    (command,) = re.findall(r'^CMD \["(\w+)"', dockerfile, re.MULTILINE)
    module, _, function = PROJECT["scripts"][command].partition(":")
    assert hasattr(importlib.import_module(module), function)
    # What building the package reads, and nothing else of the checkout.
    copied = {
        name
        for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE)
        for name in line.split()
    }
    files = PROJECT["license-files"]
    constraints = "deploy/constraints.txt"
    assert copied == {"pyproject.toml", "setup.py", "README.md", *files, "kerasps", constraints}
    context = (CHECKOUT / ".dockerignore").read_text()
    assert set(re.findall(r"^!(.+)$", context, re.MULTILINE)) == copied


def test_two_builds_of_the_image_install_the_same_versions():
    text = (CHECKOUT / "deploy" / "constraints.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    for requirement in PROJECT["dependencies"]:
        name, _, least = requirement.partition(">=")
        version = [int(part) for part in pinned[name].split(".")[:2]]
        assert version >= [int(part) for part in least.split(".") if least], name
    for package, (_, last) in _compat.TESTED_VERSIONS.items():
        assert pinned[package].split(".")[:2] == [*map(str, last)]
    dockerfile = (CHECKOUT / "deploy" / "Dockerfile").read_text()
    installs = re.findall(r"pip install .*", dockerfile)
    assert installs
    assert all("--constraint /source/constraints.txt" in command for command in installs)


def test_the_labels_of_the_image_are_those_of_the_package():
    dockerfile = (CHECKOUT / "deploy" / "Dockerfile").read_text()
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.+?)"', dockerfile))
    assert (labels["title"], labels["licenses"]) == (PROJECT["name"], PROJECT["license"])
    assert labels["version"] == kerasps.__version__
    assert labels["source"] == PROJECT["urls"]["Source"]
    assert labels["documentation"] == PROJECT["urls"]["Documentation"]


def test_the_tags_of_images_are_the_version():
    pages = [*(CHECKOUT / "deploy").rglob("*"), *(CHECKOUT / "docs").glob("*.md")]
    found = {
        (tag, path.name)
        for path in pages
        if path.is_file()
        for tag in re.findall(r"kerasps:(\d[\w.]*)-(?:cpu|gpu)\b", path.read_text())
    }
    assert {tag for tag, _ in found} == {kerasps.__version__}, found
