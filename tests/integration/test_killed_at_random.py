"""Workers that are killed at random instants of `fit`, `evaluate` and `predict`. `tox -e chaos` does it for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("killed_at_random.py")


def test_every_call_visits_each_example_once_whatever_is_killed_when():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seconds", "40"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert '"kills": 0,' not in done.stdout
