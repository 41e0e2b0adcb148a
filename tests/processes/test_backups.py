"""Trainings whose coordinator is killed, and all tasks with it, go on from their last backup."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.killed_and_restarted import KILL_PS, run_with_kills

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "trainings",
    [["unknown", "endless"], pytest.param(["known", "creator"], marks=pytest.mark.matrix)],
    ids=" and ".join,
)
def test_one_worker_ends_as_without_a_loss_bit_for_bit(tmp_path, trainings):
    report, codes, printed = run_with_kills(
        HERE / "backed_up_training.py", tmp_path, "--only", *trainings
    )
    assert report["different"] == [], printed
    assert codes == [-signal.SIGKILL] * 2


@pytest.mark.parametrize("table", [[], ["--dynamic"], ["--dynamic", "--delta"]])
def test_two_workers_count_each_step_and_example_once(tmp_path, table):
    report, codes, printed = run_with_kills(
        HERE / "backed_up_counts.py", tmp_path, *table, signals=[KILL_PS, signal.SIGTERM]
    )
    assert report["problems"] == [], printed
    assert codes == [1, 128 + signal.SIGTERM]
    assert "PSLostError" in printed
