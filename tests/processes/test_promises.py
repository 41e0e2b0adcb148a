"""What the README promises of losses, where a loss is made at the very instant that counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

STEPS, EPOCHS, BATCH_SIZE = 100, 2, 4


@pytest.mark.parametrize("steps_per_execution", [1, 10])
def test_a_step_whose_worker_dies_is_done_once(tmp_path, steps_per_execution):
    script = Path(__file__).with_name("held_step.py")
    report = run_and_report(script, tmp_path, steps_per_execution)
    assert report == {
        "iterations": EPOCHS * STEPS,
        "updates": [EPOCHS * STEPS],
        "rows": EPOCHS * STEPS * BATCH_SIZE,
        "history": {"batches": [STEPS] * EPOCHS, "examples": [STEPS * BATCH_SIZE] * EPOCHS},
    }
