"""The behaviour of TensorFlow's coordinator that no look at its names can check."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.process_checks import run_script

SCRIPT = Path(__file__).with_name("coordinator_port.py")


@pytest.fixture(scope="module")
def answers(once):
    return once("coordinator-port", run)


def run():
    done = run_script(SCRIPT, env=os.environ)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line.removeprefix("ANSWER ")) for line in lines]


DEVICES = [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(3)]


def test_each_worker_has_a_session_on_its_device(answers):
    assert answers[0] == {"workers": [0, 1], "devices": DEVICES[:2]}


def test_a_session_begins_again_when_its_worker_is_back(answers):
    assert answers[1] == {"is_seen": True, "is_waiting": True, "again": ["first", 1]}


def test_a_session_that_is_to_try_again_does(answers):
    assert answers[2] == {"tries": 3}


def test_a_worker_whose_thread_is_stuck_gets_another(answers):
    assert answers[3] == {"stuck": [0, 1], "renewed": 1}


def test_a_worker_that_is_added_has_a_thread(answers):
    assert answers[4] == {"is_there": True, "devices": DEVICES}


def test_a_function_that_a_user_schedules_goes_to_another_worker(answers):
    assert answers[5] == {"scheduled": 50}


def test_a_call_that_waits_for_ever_is_cancelled(answers):
    assert answers[6] == {"is_waiting": True, "outcome": "CancelledError"}
