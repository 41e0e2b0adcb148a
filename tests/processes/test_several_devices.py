"""Workers with several devices train as one with a larger batch does, and all is counted exactly.

The devices are logical CPU devices of the workers, so nothing here needs a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("several_devices.py")
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def report_of(once):
    """Returns what a scenario reports, which runs once."""

    def found(scenario):
        name = f"several-devices-{scenario.replace(' ', '-')}"
        return once(name, lambda: run_and_report(SCRIPT, scenario))

    return found


def cases(ordinary, at_length):
    """The cases of a test: those of one process, and more, of one that `tox -e matrix` runs."""
    scenarios = {
        "one worker": (ordinary, ()),
        "one worker at length": (at_length, pytest.mark.matrix),
    }
    return [
        pytest.param(scenario, *case, marks=marks, id="-".join(map(str, case)))
        for scenario, (scenario_cases, marks) in scenarios.items()
        for case in scenario_cases
    ]


def test_the_devices_that_were_named_compute(report_of):
    names = ["CPU:0", "CPU:1"]
    assert report_of("one worker")["devices"] == [names, names, 1]


@pytest.mark.parametrize(
    ("scenario", "optimizer", "steps_per_execution"),
    cases(
        [("global_clipnorm", 1), ("accumulation", 1), ("adam", 4)],
        [
            ("sgd", 1),
            ("averages", 1),
            ("momentum", 1),
            ("adam", 1),
            ("adagrad", 1),
            ("clipnorm", 1),
            ("accumulation", 4),
            ("nadam", 1),
            ("loss_scale", 1),
        ],
    ),
)
def test_two_replicas_of_16_equal_plain_keras_with_batches_of_32(
    report_of, scenario, optimizer, steps_per_execution
):
    found = report_of(scenario)["equal_plain_keras"][f"{optimizer} {steps_per_execution}"]
    assert found["moved"] > 0.01
    assert found["weights"] < TOLERANCE
    assert found["logs"] < TOLERANCE
    plain, ours = found["iterations"]
    assert plain == ours


def test_rows_are_asked_for_once_per_worker(report_of):
    # Six steps, in each of which both replicas look up the same six rows, and share them.
    rows, steps = report_of("one worker")["rows_read"]
    assert steps == 6
    assert rows == 6 * 6


@pytest.mark.parametrize(
    ("scenario", "steps_per_execution", "data"),
    cases(
        [(3, "generator")],
        [(1, "unknown"), (1, "known"), (3, "unknown"), (25, "unknown"), (25, "known")],
    ),
)
def test_data_that_end_within_a_step_are_counted_exactly(
    report_of, scenario, data, steps_per_execution
):
    found = report_of(scenario)["ends_of_data"][f"{steps_per_execution} {data}"]
    assert found == {
        "batches": [23.0],
        "examples": [92.0],
        "ids": [float(sum(range(92)))],
        "heard": 22,
        "rows": [-1.0, 0.0],
        "weights": [-23.0],
        # Eleven of two batches, and one of what is left over.
        "iterations": 12,
    }


def test_what_replicas_assign_is_put_together_as_its_aggregation_says(report_of):
    states = report_of("one worker")["states"]
    assert states["calls"] == 8
    # In batches 1 to 8, of which the first replica sees the odd ones.
    assert states["mean"] == states["unset"] == pytest.approx(36 / 2)
    assert states["sum"] == pytest.approx(36)
    assert states["first"] == pytest.approx(16)
    assert states["moving_mean"] == pytest.approx(states["expected_mean"], rel=1e-6)


def test_each_replica_draws_what_a_single_one_would_draw_for_its_batch(report_of):
    states = report_of("one worker")["states"]
    assert states["different_masks"] == 16
    assert states["first_as_plain"]
    assert states["seeds_drawn"] == 16
    assert states["different_numbers"] == 22


def test_a_step_that_updates_twice_meets_twice(report_of):
    plain, ours = report_of("one worker")["two_updates"]
    assert ours == pytest.approx(plain, abs=TOLERANCE)
    assert plain[0] != plain[1] != 1.0


def test_evaluate_and_predict_equal_plain_keras(report_of):
    found = report_of("one worker")["evaluated"]
    assert found["logs"] < TOLERANCE
    assert max(found["outputs"]) < TOLERANCE


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("xla", "UnsupportedError", "Received: jit_compile=True with CPU:0, CPU:1."),
        ("synchronized", "UnsupportedError", "Received: `all_reduce` with several devices"),
        ("custom loop", "UnsupportedError", "computes on one device of its worker"),
        ("other devices", "ValueError", "Received: worker_devices=('CPU:1',)."),
    ],
)
def test_what_several_devices_cannot_do_is_refused(report_of, what, error, words):
    refusal = report_of("one worker")["refusals"][what]
    assert refusal.startswith(f"{error}: ")
    assert words in refusal


@pytest.mark.parametrize(
    ("scenario", "devices"),
    [
        pytest.param("equal", [["CPU:0", "CPU:1"]] * 2, marks=pytest.mark.matrix),
        ("unequal", [["CPU:0"], ["CPU:0", "CPU:1"]]),
        pytest.param("paced", [["CPU:0", "CPU:1"]] * 2, marks=pytest.mark.matrix),
        pytest.param("overlapping", [["CPU:0", "CPU:1"]] * 2, marks=pytest.mark.matrix),
    ],
)
def test_a_killed_worker_costs_no_batch_and_repeats_none(report_of, scenario, devices):
    report = report_of(scenario)
    assert report["devices"] == devices
    for found in [report["unharmed"], *report["killed"]]:
        assert found["batches"] == [301.0, 301.0]
        assert found["examples"] == [1204.0, 1204.0]
        assert found["weights"] == [-602.0]
    if scenario == "equal":
        # Of each epoch, 150 pairs of 301 batches and one; or 149 and three, where splits end.
        assert 302 <= report["unharmed"]["iterations"] <= 306


def test_devices_that_a_worker_lacks_are_refused(report_of):
    report = report_of("missing")
    refusal = report["refused"]
    assert refusal.startswith("ValueError: Argument `worker_devices` names devices that worker 1 ")
    assert "does not have. Expected: names among CPU:0. Received: worker_devices=" in refusal
    # Those that every worker has are taken, by the same process.
    assert report["devices"] == [["CPU:0"]] * 2
    assert report["examples"] == [1204.0, 1204.0]
    assert report["iterations"] == 602


@pytest.mark.matrix
def test_a_worker_that_comes_back_with_other_devices_computes_on_those(report_of):
    report = report_of("changed")
    assert report["devices"] == [[["CPU:1"], ["CPU:1"]], [["CPU:1"], ["CPU:0"]]]
    assert report["kinds"] == [["CPU:0"], ["CPU:1"]]  # the step was traced for both
    assert report["batches"] == [301.0, 301.0]
    assert report["examples"] == [1204.0, 1204.0]
    assert report["weights"] == [-602.0]
    assert report["iterations"] == 602
