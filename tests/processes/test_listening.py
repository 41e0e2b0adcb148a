"""Who can reach the processes of a cluster: what the system says, and what a stranger finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from support.process_checks import (
    ALONE,
    IS_NIGHTLY,
    UNTESTED,
    is_listening,
    listening_addresses,
    marked_environment,
    marked_processes,
    report_in,
    temporary_files,
    wait_for,
)

TRAINING = Path(__file__).with_name("listening_training.py")
STRANGERS = Path(__file__).with_name("strangers.py")
TESTS = str(Path(__file__).parents[1])
NAMESPACE = ["unshare", "-rn"]


@pytest.fixture
def namespaces():
    """Skips where a user may make no network namespaces, and says what the system said."""
    pair = ["ip", "link", "add", "one", "type", "veth", "peer", "name", "other"]
    try:
        done = subprocess.run([*NAMESPACE, *pair], capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"network namespaces need a program that is not here: {error.filename}")
    if done.returncode != 0:
        pytest.skip(f"this system permits no network namespaces: {done.stderr.strip()}")


def with_tests(env):
    """The environment of a program that imports what tests share."""
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, (TESTS, env.get("PYTHONPATH"))))}


@pytest.fixture
def start(tmp_path):
    """Starts a program of this folder, and ends with no process and no file left behind."""
    mark = str(uuid.uuid4())
    started = []

    def start_program(*command):
        env = marked_environment(
            mark, tmp_path, KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3"
        )
        process = subprocess.Popen(
            command,
            env=with_tests(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        process.mark = mark
        started.append(process)
        return process

    yield start_program
    for process in started:
        process.kill()
        process.communicate()
    wait_for(lambda: marked_processes(mark) == {}, "the end of all processes")
    assert temporary_files(tmp_path) == []


def report_of(process):
    for line in process.stdout:
        if line.startswith("REPORT "):
            return json.loads(line.removeprefix("REPORT "))
    pytest.fail(f"the program ended: {process.communicate()[1][-4000:]}")


def all_listening(mark):
    """Where each process listens that carries the mark, by its name."""
    found = {}
    for pid, name in marked_processes(mark).items():
        if sockets := listening_addresses(pid):
            found[name] = sockets
    return found


def launched(start, *prefix):
    process = start(
        *prefix,
        *(sys.executable, "-m", "kerasps", "launch", "--num-workers", "1", str(TRAINING)),
    )
    report = report_of(process)
    assert report["steps"] == 8
    found = all_listening(process.mark)
    assert len(found) == 3
    assert {"worker-0", "ps-0"} < set(found)
    addresses = {address for sockets in found.values() for address, _ in sockets}
    assert addresses == {"127.0.0.1"}
    reached = {is_listening(f"127.0.0.1:{port}") for s in found.values() for _, port in s}
    _, err = process.communicate("\n")
    assert process.returncode == 0, err
    assert "every network interface" not in err
    return reached


def test_a_launched_cluster_listens_on_the_loopback_alone(start):
    assert launched(start) == {True}


def test_a_cluster_in_a_namespace_of_its_own_is_out_of_reach_of_other_users(start, namespaces):
    """The recipe of docs/security.md."""
    assert launched(start, *ALONE) == {False}


def test_where_bind_cannot_be_held_nothing_starts_unless_it_may(start):
    process = start(sys.executable, str(TRAINING), "foreign")
    report = report_of(process)
    assert "cannot be held to 127.0.0.1" in report["refused"]
    assert "its `bind` is not that of the system" in report["refused"]
    assert report["listened"] == []
    assert report["steps"] == 8
    ((address, _),) = report["listens"]
    assert address in ("::", "0.0.0.0")
    (warning,) = (
        text for text in report["warnings"] if not (IS_NIGHTLY and text.startswith(UNTESTED))
    )
    assert warning.startswith("The server cannot be held to 127.0.0.1, and port ")
    found = all_listening(process.mark)
    assert {a for name in ("worker-0", "ps-0") for a, _ in found[name]} == {"127.0.0.1"}
    _, err = process.communicate("\n")
    assert process.returncode == 0, err


def test_who_reaches_a_served_task(namespaces, tmp_path):
    """One run for all: it starts six tasks and two more namespaces."""
    env = marked_environment("strangers", tmp_path, TF_CPP_MIN_LOG_LEVEL="3")
    done = subprocess.run(
        [*NAMESPACE, sys.executable, str(STRANGERS)],
        env=with_tests(env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = report_in(done)
    check_where_tasks_listen(report["tasks"])
    for host, name in (("198.51.100.7", "service"), ("no-such-host.invalid", "unknown")):
        said, exit_code = report["refused"][name]
        assert exit_code == 2
        assert said.startswith("kerasps serve: error: worker 0 does not start, since it would ")
        assert repr(host) in said
    refused = dict.fromkeys(("entry", "ipv6", "bound", "loopback"), "ConnectionRefusedError")
    assert report["stranger"] == refused | {"everywhere": "reached"}
    reached = dict.fromkeys((*refused, "everywhere"), "reached")
    assert report["peer"] == reached | {"loopback": "ConnectionRefusedError"}
    # As docs/security.md says, an address is no firewall: a neighbour on any link may send to it.
    assert report["neighbour"]["entry"] == "reached"
    assert report["neighbour"]["loopback"] == "ConnectionRefusedError"


def check_where_tasks_listen(tasks):
    everywhere = ("::", "every network interface")
    expected = {
        "entry": ("10.1.0.1", "10.1.0.1"),
        "ipv6": ("fd00:1::1", "fd00:1::1"),
        "loopback": ("127.0.0.1", "127.0.0.1"),
        "bound": ("10.1.0.1", "10.1.0.1"),
        "everywhere": everywhere,
    }
    assert set(tasks) == set(expected)
    for name, (address, place) in expected.items():
        ((listens, port),) = tasks[name]["listens"]
        (ready,) = tasks[name]["said"]
        assert listens == address, name
        assert ready == f"kerasps serve: worker 0 listens on port {port} of {place}"
