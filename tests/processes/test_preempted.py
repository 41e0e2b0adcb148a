"""What TensorFlow tests of losses under this strategy, for `model.fit`, with exact counts."""

from __future__ import annotations

from pathlib import Path

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("preempted.py")


def test_preempted_workers_and_a_lost_ps_as_tensorflow_has_them():
    report = run_and_report(SCRIPT)
    assert len(report) == 13
    assert all(report.values()), report
