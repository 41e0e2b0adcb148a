"""Workers that hang, leave, die, move and join while `fit` runs: noticed, replaced, taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

pytestmark = pytest.mark.timeout(180)

SCRIPT = Path(__file__).with_name("members.py")
# The limit that the script sets for a task that hangs.
HANG_LIMIT_S = 3
# What a worker that answers may take to be back, on a machine that is busy with other tests.
BACK_S = 2 + 3


def test_workers_come_and_go_while_fit_counts_every_example_once():
    report = run_and_report(SCRIPT)
    assert report["exact"], report
    assert report["was_running"], report
    assert HANG_LIMIT_S - 1 < report["noticed_s"] < HANG_LIMIT_S + 5
    assert report["others_go_on"]
    assert report["left"] in ("leaving", "left"), report
    assert report["exit_code"] == 0
    assert report["left_s"] < 15
    for what in ("awake_s", "new_s", "back_s", "moved_s"):
        assert report[what] < BACK_S, (what, report)
    assert report["joined_s"] < BACK_S + 2  # the resolver is asked every two seconds
    assert report["helps_s"] < 30, "two passes"
    assert report["gone"]
    assert report["workers"] == ["connected", "lost", "connected"]
    # What becomes of worker 1 is nothing to worker 0.
    assert report["made_ready"] > 0
    assert report["made_ready_again"] == 0
