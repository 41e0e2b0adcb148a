"""Scheduled functions: whichever worker is killed when, each ps applies each update once."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("scheduled_kills.py")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("single", marks=pytest.mark.matrix),
        pytest.param("whole", marks=pytest.mark.matrix),
        "looped",
    ],
)
def test_every_update_is_applied_once_when_workers_are_killed_at_random(kind):
    report = run_and_report(SCRIPT, "--kills", 4, "--seed", 3, "--kind", kind)
    assert report["problems"] == []
    assert report["kills"] >= 4
