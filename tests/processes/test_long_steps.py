"""A step may take minutes in which nothing is sent, and a worker that hangs in it is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import EVER_S, run_and_report

SCRIPT = Path(__file__).with_name("long_steps.py")


# gRPC's servers limit pings: with their limit, a call that waits for 130 s fails.
@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seconds", [150, 330])
def test_steps_of_minutes_end_and_a_worker_that_hangs_in_one_is_noticed(seconds):
    report = run_and_report(SCRIPT, seconds, timeout_s=EVER_S)
    assert report["updates"] == 3
    assert report["weights"] == [-3.0]
    assert report["times_taken_back"] == 0, "worker 0, which did not hang"
    assert report["noticed"] in ("hangs", "lost")
