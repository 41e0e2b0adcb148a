"""A task that is silent for less than the hang limit ends nothing, whichever call waits for it."""

from __future__ import annotations

from pathlib import Path

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("paused_tasks.py")


def test_a_task_that_is_stopped_for_less_than_the_limit_ends_nothing():
    report = run_and_report(SCRIPT)
    assert report["problems"] == []
    assert report["updates"] == report["wanted"] > 0
    assert report["weights"] == [report["wanted"]]
    assert report["times_taken_back"] == [0, 0]
