"""What TensorFlow tests of losses under this strategy, for `model.fit`, with exact counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

pytestmark = pytest.mark.timeout(180)

SCRIPT = Path(__file__).with_name("preempted.py")


def test_preempted_workers_and_a_lost_ps_as_tensorflow_has_them():
    report = run_and_report(SCRIPT)
    # TensorFlow's own waits for tens of seconds; a busy machine needs some.
    assert report.pop("seconds_to_errors") < 60
    assert len(report) == 13
    assert all(report.values()), report
