"""Anything dies at any time, and the training ends with the result that it would have had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.process_checks import light_environment

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1500)]

SCRIPT = Path(__file__).with_name("chaos.py")
# `tox -e chaos` takes an hour.
SECONDS = 20


@pytest.mark.parametrize(
    ("optimizer", "seed"), [pytest.param("sgd", 1, marks=pytest.mark.matrix), ("adam", 2)]
)
def test_whatever_dies_every_update_is_applied_once_and_every_example_counted(optimizer, seed):
    arguments = ["--seconds", SECONDS, "--seed", seed, "--optimizer", optimizer]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=light_environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    report = json.loads(lines[0].removeprefix("REPORT "))
    assert report["exit_code"] == 0, report.pop("said_last") + str(report)
    assert report["is_done"], report
    assert report["wrong"] == []
    assert report["passes"] >= 1
    assert sum(report["sent"].values()) >= 2
