"""A cluster that is closed on purpose: its process goes on in silence, and what needs the cluster
says so.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from support.process_checks import marked_environment, marked_processes

SCRIPT = Path(__file__).with_name("closed_cluster.py")
CLOSED = r"is closed, and the variables on it are gone: .*Save the model before.*outside of `strat"


def run(scenario, directory):
    """Return what a process reports, and what it prints to stderr from when it closes."""
    mark = str(uuid.uuid4())
    done = subprocess.run(
        [sys.executable, str(SCRIPT), scenario, str(directory)],
        env=marked_environment(
            mark, directory, KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="1"
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert marked_processes(mark) == {}
    printed, line = done.stdout.rsplit("REPORT ", 1)
    return json.loads(line), printed, done.stderr.partition("CLOSING\n")[2]


@pytest.fixture(scope="module")
def used(once, tmp_path_factory):
    return once("closed-cluster", lambda: run("used", tmp_path_factory.mktemp("closed")))


def test_a_process_goes_on_without_its_cluster(used):
    assert used[0]["wrong"] == []


def test_a_process_that_has_closed_its_cluster_prints_nothing(used):
    # TensorFlow's words on the error that the script asks for; 2.23 adds where it came from.
    text = re.sub(r"=== Source Location Trace: === *\n(?:.*\.cc:\d+\n)*\n?", "", used[2])
    lines = [line for line in text.splitlines() if "indices = 7 is not in" not in line]
    assert lines == []


def test_connecting_and_closing_log_no_information_of_tensorflows(used):
    # TensorFlow's word on `join`, which the script calls.
    printed = used[1].replace("Waiting for all global closures to be finished.", "")
    assert re.findall(r"INFO:tensorflow:.+", printed) == []


def test_what_needs_the_cluster_says_that_it_is_closed_and_where(used):
    errors = dict(used[0]["errors"])
    assert errors.pop("out of range")[0] == "InvalidArgumentError"
    assert errors.pop("no file")[0] == "NotFoundError"
    for argument in ("3, 2", "2, 2, max_restarts=0", "2, 2, log_dir='elsewhere'"):
        errors.pop(argument)
    assert len(errors) > 25
    place = r"the `with` block of its LocalCluster ended at \S+closed_cluster\.py:\d+\. "
    unclear = {
        name: error
        for name, error in errors.items()
        if error[0] != "kerasps"
        or not re.search(CLOSED, error[1])
        or not re.search(place, error[1])
    }
    assert unclear == {}


@pytest.mark.parametrize(
    ("arguments", "name", "expected", "received"),
    [
        ("3, 2", "num_workers", "2", "3"),
        ("2, 2, max_restarts=0", "max_restarts", "3", "0"),
        ("2, 2, log_dir='elsewhere'", "log_dir", "None", "'/.*elsewhere'"),
    ],
)
def test_a_connected_process_is_told_how_another_cluster_differs(
    used, arguments, name, expected, received
):
    kind, message = used[0]["errors"][arguments]
    assert kind == "ClusterConfigError"
    assert re.search(
        rf"`{name}` differs.*Expected: {name}={expected}, which.*Received: {name}={received}\. "
        r"Pass the first value, or restart the process \(in a notebook, the kernel\)",
        message,
    )


@pytest.mark.matrix
def test_a_cluster_can_be_closed_while_steps_are_in_flight_and_a_worker_is_stopped(tmp_path):
    report, _, stderr = run("in_flight", tmp_path)
    assert {name: error[0] for name, error in report["errors"].items()} == {
        "fit": "kerasps",
        "predict": "kerasps",
    }
    assert re.search(r"`LocalCluster\.close\(\)` was called at \S+:\d+", report["errors"]["fit"][1])
    assert stderr == ""


@pytest.mark.matrix
def test_a_try_to_connect_that_failed_leaves_the_process_free_for_another_cluster(tmp_path):
    report, _, stderr = run("failed_first", tmp_path)
    assert report["errors"]["devices"][0] == "ValueError"
    kind, message = report["errors"]["closed"]
    assert kind == "kerasps"
    assert re.match(r"The cluster is closed: the `with` block.*Create a new LocalCluster", message)
    # Described by TF_CONFIG, it is the same cluster.
    assert report["errors"]["predict"][0] == "kerasps"
    # TensorFlow's word on the server of the first try, when the second begins.
    lines = [line for line in stderr.splitlines() if "Unable to destroy server_" not in line]
    assert lines == []
