"""With `max_staleness`, no worker gets further ahead of a slow one, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("paced_training.py")


@pytest.mark.parametrize("bound", [1, pytest.param(6, marks=pytest.mark.matrix)])
def test_a_worker_waits_for_a_slow_one(bound):
    report = run_and_report(SCRIPT, bound)
    fast, slow = report["pushes"]
    assert report["most_ahead"] <= bound
    # The slow one has done its part, or it would not have been waited for.
    assert abs(fast - slow) <= bound
    assert fast + slow == report["iterations"] == 120
    assert report["batches"] == [60.0, 60.0]
    assert report["looks"] > 1, "nobody has looked"
    # While one step is worked out, the other worker goes from so far behind to so far ahead.
    assert report["max_staleness"] <= 2 * bound - 1
