"""Tasks that are SIGKILLed while `fit` runs: counts stay exact, or an error names the task.

Real processes, a case of each kind; `tests/unit/test_epoch_state.py` has the combinations.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("faulty_training.py")


# One process has those of a group in turn: what each of them asserts is of its own model alone.
GROUPS = [
    [
        *("worker_gone:7", "evaluate_worker_gone:3"),
        *("holding_worker_restarted_finite:1", "worker_restarted_finite_whole:7", "ps_gone:5"),
    ],
    [
        *("lookup_worker_restarted_then_gone:7", "holding_worker_restarted:7"),
        *(
            "new_ids_worker_restarted_finite:7",
            "worker_gone_finite:7",
            "predict_worker_restarted:3",
            "holding_all_workers_gone:5",
        ),
    ],
    ["worker_restarted:1", "holding_worker_gone:1", "holding_ps_gone:5"],
]


@pytest.fixture(scope="module")
def run(once):
    """Runs the group of a scenario, once, and returns what it reports of the scenario."""

    def report_of(scenario, steps_per_execution):
        named = f"{scenario}:{steps_per_execution}"
        (index,) = [index for index, group in enumerate(GROUPS) if named in group]
        group = GROUPS[index]
        reports = once(f"faults-{index}", lambda: run_and_report(SCRIPT, *group))
        return reports[scenario]

    return report_of


@pytest.mark.parametrize(
    ("scenario", "steps_per_execution"),
    [pytest.param("worker_restarted", 1, marks=pytest.mark.matrix), ("worker_gone", 7)],
)
def test_a_lost_worker_leaves_counts_exact(run, scenario, steps_per_execution):
    report = run(scenario, steps_per_execution)
    assert "error" not in report, report
    assert report["failures"] > 0, "the worker was killed when nothing ran"
    assert report["history"]["batches"] == [120.0] * 4
    assert report["iterations"] == 480
    assert report["finite_weights"]


def test_a_worker_that_comes_back_has_its_lookup_tables_again_and_works_when_the_other_is_lost(run):
    report = run("lookup_worker_restarted_then_gone", 7)
    assert "error" not in report, report
    assert report["failures"] > 1, "a worker was killed when nothing ran"
    assert report["history"]["batches"] == [120.0] * 4
    assert report["history"]["loss"] == [0.0] * 4
    assert report["iterations"] == 480
    assert report["finite_weights"]


@pytest.mark.parametrize(
    ("scenario", "steps_per_execution"),
    [
        ("holding_worker_restarted", 7),
        pytest.param("holding_worker_gone", 1, marks=pytest.mark.matrix),
    ],
)
def test_results_that_a_lost_worker_held_are_worked_out_again(run, scenario, steps_per_execution):
    report = run(scenario, steps_per_execution)
    assert "error" not in report, report
    assert report["failures"] > 0, "the worker was killed when nothing ran"
    assert report["history"]["batches"] == [600.0] * 2
    assert report["iterations"] == 1200


def test_a_lost_worker_that_held_results_of_finite_data_reads_them_again(run):
    report = run("holding_worker_restarted_finite", 1)
    assert "error" not in report, report
    assert report["failures"] > 0, "the worker was killed when nothing ran"
    assert report["history"]["batches"] == [250.0] * 2
    assert report["history"]["ids"] == [sum(range(2000))] * 2
    assert report["iterations"] == 500


@pytest.mark.parametrize(
    ("scenario", "data"), [("worker_restarted", "finite_whole"), ("worker_gone", "finite")]
)
def test_what_a_lost_worker_has_not_read_is_read_by_it_or_by_others(run, scenario, data):
    report = run(f"{scenario}_{data}", 7)
    assert "error" not in report, report
    assert report["failures"] > 0, "the worker was killed when nothing ran"
    assert report["history"]["batches"] == [250.0] * 2
    assert report["history"]["ids"] == [sum(range(2000))] * 2
    assert report["history"]["squares"] == [sum(i * i for i in range(2000))] * 2
    assert report["iterations"] == 500
    if scenario == "worker_gone_finite":
        assert report["ids_without_worker"] == sum(range(2000)), (
            "what it would have read was not read by others"
        )


def test_rows_of_new_ids_and_their_updates_are_exact_when_a_worker_is_lost(run):
    report = run("new_ids_worker_restarted_finite", 7)
    assert "error" not in report, report
    assert report["failures"] > 0, "the worker was killed when nothing ran"
    every, admitted = report["tables"]
    # Each word comes once an epoch, and is updated whenever it comes.
    assert (every["rows"], every["counts"]) == (2000, [2.0])
    # This table makes the row when the word comes again; the first gradient is dropped.
    assert (admitted["rows"], admitted["counts"]) == (2000, [1.0])
    assert (admitted["candidates"], admitted["refused_by_admission"]) == (0, 2000)


def test_evaluate_is_exact_when_a_worker_is_lost(run):
    report = run("evaluate_worker_gone", 3)
    assert "error" not in report, report
    assert report["failures"] > 0, "the worker was killed when nothing ran"
    assert report["logs"] == pytest.approx(report["expected"], rel=1e-5)
    assert report["logs"]["ids"] == sum(range(2000))
    assert report["iterations"] == 480


def test_predict_gives_every_row_in_order_when_a_worker_is_lost(run):
    report = run("predict_worker_restarted", 3)
    assert "error" not in report, report
    assert report["failures"] > 0, "the worker was killed when nothing ran"
    assert (report["rows"], report["difference"]) == (2000, 0.0)


def test_a_worker_that_is_lost_in_the_validation_is_not_waited_for_by_the_training():
    script = SCRIPT.with_name("lost_in_validation.py")
    report = run_and_report(script, KERASPS_WORKER_TIMEOUT="60")
    assert report["ids"] == [sum(range(803))] * 6
    assert report["iterations"] == 3 * 201
    assert report["evaluated"] == sum(range(803))


@pytest.mark.parametrize(
    "scenario", ["ps_gone", pytest.param("holding_ps_gone", marks=pytest.mark.matrix)]
)
def test_a_lost_ps_ends_fit_with_an_error_that_names_it(run, scenario):
    report = run(scenario, 5)
    assert report["error"] == "PSLostError", report
    assert "ps 1 at 127.0.0.1:" in report["text"]
    assert "Start the ps again" in report["text"]
    assert report["saving"].startswith("PSLostError: ps 1 at 127.0.0.1:")


def test_whatever_needs_the_variables_of_a_lost_ps_ends_in_an_error_that_names_it():
    report = run_and_report(SCRIPT.with_name("lost_ps_calls.py"))
    assert len(report) == 2 * 26
    # TensorFlow by itself waits for a lost task without end.
    for call, ended in report.items():
        assert ended.startswith("PSLostError"), (call, ended)
        assert "ps 1 at 127.0.0.1:" in ended, (call, ended)
        assert "Start the ps again" in ended, (call, ended)


def test_the_loss_of_all_workers_ends_in_an_error_that_names_them(run):
    report = run("holding_all_workers_gone", 5)
    assert report["error"] == "WorkerLostError", report
    assert "no answer from worker 0, worker 1" in report["text"]
    assert any("No worker has taken a step" in warning for warning in report["warnings"])
