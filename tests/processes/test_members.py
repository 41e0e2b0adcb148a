"""Workers that hang, leave, die, move and join while `fit` runs: noticed, replaced, taken back."""

from __future__ import annotations

from pathlib import Path

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("members.py")


def test_workers_come_and_go_while_fit_counts_every_example_once():
    report = run_and_report(SCRIPT)
    assert report["exact"], report
    assert report["in_turn"] == [
        *("noticed", "others go on", "awake", "left", "new", "back", "moved", "joined"),
        *("helps", "gone"),
    ]
    assert report["was_running"], report
    assert report["left"] in ("leaving", "left"), report
    assert report["exit_code"] == 0
    assert report["workers"] == ["connected", "lost", "connected"]
    # What becomes of worker 1 is nothing to worker 0.
    assert report["made_ready"] > 0
    assert report["made_ready_again"] == 0
