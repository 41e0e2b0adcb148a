"""The behaviour of TensorFlow's coordinator that no look at its names can check."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("coordinator_port.py")


@pytest.fixture(scope="module")
def answers():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=200, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line.removeprefix("ANSWER ")) for line in lines]


def test_each_worker_has_a_session_on_its_device_with_a_source_of_its_own(answers):
    assert answers[0] == {
        "workers": [0, 1],
        "devices": [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(2)],
        "num_sources": 2,
        "sources": ["Source"],
        "has_failed": False,
        "lost": [],
    }


def test_a_session_begins_again_with_a_new_source_when_its_worker_is_back(answers):
    assert answers[1] == {
        "is_seen": True,
        "again": ["first", 1],
        "is_new": True,
        "lost": [],
        "has_failed": False,
    }


def test_an_error_is_known_before_the_sessions_are_joined_and_raised_once(answers):
    assert answers[2] == {
        "is_known": True,
        "is_still_going": True,
        "raised": "of the user's own",
        "has_failed": False,
        "takes_sessions": True,
    }


def test_reports_of_a_lost_ps_are_forgotten(answers):
    assert answers[3] == {"reports": [0]}


def test_a_call_that_waits_for_ever_is_cancelled(answers):
    assert answers[4] == {"is_waiting": True, "outcome": "CancelledError"}


def test_a_lost_ps_is_known_while_a_session_uses_it(answers):
    assert answers[5] == {"is_known": True, "is_of_lost_ps": True}
