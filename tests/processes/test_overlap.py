"""With `overlap`, steps are at most one update of their own worker behind, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

STEPS = 66


def test_overlapping_steps_are_one_update_behind_and_all_are_applied():
    report = run_and_report(Path(__file__).with_name("overlapping_training.py"))
    for layout, counted in report["counted"].items():
        assert counted["iterations"] == 2 * STEPS, layout
        assert counted["weights"] == [-2 * STEPS], layout
        assert counted["rows"] == [-2], layout
        assert counted["examples"] == [264, 264], layout
        assert counted["pushes"] == 2 * 2 * STEPS, layout
        assert counted["most_stale"] == 1, layout
        assert 0 < counted["mean"] < 1, layout
    # The learning rate of each step follows from its own number: of steps 0 to 20 it is 1.
    assert report["scheduled"] == [-(21 + 2 * (STEPS - 21))]
    # The mean of three gradients of 1, so often.
    assert report["accumulated"] == [pytest.approx(-STEPS / 3)]
    plain, ours = report["products"]
    assert ours == pytest.approx(plain, rel=1e-5)
    assert report["difference"] < 1e-6
