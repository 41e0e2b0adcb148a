"""Training that is interrupted at any instant: no update is lost, and nothing goes on behind the
script's back.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("interrupted_training.py")


@pytest.mark.parametrize("where", ["both", "other"])
def test_no_update_is_lost_whenever_training_is_interrupted(once, where):
    report = once("interrupts", lambda: run_and_report(SCRIPT, 1, 9))[where]
    assert report["problems"] == []
    assert set(report["ways"]) == {"fit", "watched", "on_batch", "failing"}
    assert report["pairs"] > 2
    assert report["slots"] == report["weights"] == 5
    assert report["stopped"] == 10, "the next fit waited for a worker that does not answer"
