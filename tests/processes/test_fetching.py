"""Fetching what is not made yet."""

from __future__ import annotations

from pathlib import Path

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("fetched_from_stopped.py")


def test_a_fetch_from_a_worker_that_hangs_stops_no_other_thread():
    report = run_and_report(SCRIPT)
    assert report["fetched"] == [[2.0, 2.0, 2.0], ["a", "b"]]
    assert report["order"] == ["woken", "fetched"]
