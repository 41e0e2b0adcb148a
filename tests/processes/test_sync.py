"""With `update_mode="sync"`, workers make each update together, whoever is slow or killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

HERE = Path(__file__).parent
REFUSED = {
    "clipnorm": "has clipnorm=1.0",
    "clipvalue": "has clipvalue=1.0",
    "global_clipnorm": "has global_clipnorm=1.0",
    "condition": "is applied inside a condition",
    "scheduled": "is applied in a function that a custom loop schedules",
    "read again": "after an update of it",
}


SOME = ["adam", "accumulated"]


@pytest.mark.parametrize(
    ("steps_per_execution", "optimizers"),
    [
        (4, SOME),
        pytest.param(1, [], marks=pytest.mark.matrix),
        pytest.param(4, [], marks=pytest.mark.matrix),
    ],
)
def test_two_workers_equal_one_process_on_batches_of_twice_the_size(
    steps_per_execution, optimizers
):
    arguments = ["--steps-per-execution", steps_per_execution]
    if optimizers:
        arguments += ["--optimizers", *optimizers]
    report = run_and_report(HERE / "synchronous_training.py", *arguments)
    assert set(report) == set(optimizers) if optimizers else len(report) >= 14
    for name, found in report.items():
        # Adamax divides by the largest gradient there was, which may be very small.
        limit = 5e-6 if name == "adamax" else 1e-6
        assert found["weights"] < limit, name
        assert found["slots"] < limit, name
        # An update of both batches, and each batch counted.
        assert found["iterations"] == found["plain_iterations"] > 0, name
        assert found["batches"] == [24.0, 24.0], name
        assert found["staleness"] == 0, name


@pytest.mark.matrix
def test_so_do_two_workers_with_two_devices_each():
    arguments = ("--steps-per-execution", 4, "--replicas", 2, "--optimizers", "adam", "momentum")
    report = run_and_report(HERE / "synchronous_training.py", *arguments)
    for name, found in report.items():
        assert found["weights"] < 1e-6, name
        assert found["slots"] < 1e-6, name
        assert found["iterations"] == found["plain_iterations"] > 0, name
        assert found["batches"] == [48.0, 48.0], name


@pytest.mark.parametrize(
    ("calls", "kills", "seconds"),
    [(2, 3, 2), pytest.param(3, 12, 8, marks=pytest.mark.matrix)],
)
def test_nothing_is_lost_or_hangs_where_data_end_unevenly_and_workers_are_killed_at_random(
    calls, kills, seconds
):
    report = run_and_report(
        HERE / "applied_once.py",
        *("--calls", calls, "--kills", kills, "--seconds", seconds, "--seed", 9),
        *("--arguments", '{"update_mode": "sync"}'),
    )
    assert report["problems"] == []
    assert report["unharmed"]["uneven"] >= 1
    assert report["kills"] >= kills


@pytest.mark.parametrize("interrupts", [3, pytest.param(5, marks=pytest.mark.matrix)])
def test_an_interrupt_ends_fit_and_leaves_whole_updates(interrupts):
    report = run_and_report(HERE / "synchronous_interrupts.py", interrupts)
    assert report["problems"] == []
    assert report["interrupts"] == interrupts


# However long the worker is stopped.
NOBODY_IS_LOST = {"KERASPS_HANG_TIMEOUT": "600"}


@pytest.mark.matrix
def test_without_backups_all_wait_for_a_slow_worker():
    report = run_and_report(HERE / "synchronous_backups.py", "--backups", 0, **NOBODY_IS_LOST)
    assert report["meanwhile"] <= 20, "more than is on its way when the worker is stopped"
    assert set(report["batches"]) == {2000.0}
    # Each update has the gradients of both workers, but for the ends of epochs.
    assert report["iterations"] <= sum(report["batches"]) * 0.55


def test_a_backup_worker_is_not_waited_for():
    report = run_and_report(HERE / "synchronous_backups.py", "--backups", 1, **NOBODY_IS_LOST)
    assert report["meanwhile"] > 20
    assert set(report["batches"]) == {2000.0}
    for name, part in REFUSED.items():
        assert part in report["refused"][name]
        assert report["refused"][name].endswith("or train with update_mode='async'.")


def test_a_reader_of_changed_rows_sees_what_a_joint_does_later():
    report = run_and_report(HERE / "synchronous_changes.py")
    assert report == {"different": [], "more": []}
