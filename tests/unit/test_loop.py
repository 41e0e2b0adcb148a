"""How many executions are sent as one."""

from __future__ import annotations

import pytest

from kerasps.step.running.traced_step import StepTiming
from kerasps.training.loop.execution_size import ExecutionSize, executions_at_once, unlooped


@pytest.mark.parametrize(
    ("most", "in_epoch", "num_workers", "expected"),
    [
        (0, 20, 1, 1),  # executions are longer than what overlaps
        (1, None, 1, 1),
        (4, None, 3, 4),
        (4, 20, 1, 4),
        (4, 21, 1, 3),  # without a shorter one at the end
        (4, 23, 1, 4),  # there is one in any case
        (4, 20, 4, 2),  # two for each worker
        (4, 3, 4, 1),
    ],
)
def test_executions_are_sent_as_one_while_each_worker_has_its_share(
    most, in_epoch, num_workers, expected
):
    assert executions_at_once(most, in_epoch, num_workers) == expected


@pytest.mark.parametrize(
    ("steps", "unrolled", "expected"),
    [
        (1, 10, 1),
        (10, 10, 10),
        (20, 10, 10),
        (13, 10, 7),  # as equal as may be
        (10, 4, 4),
        (40, 10, 10),
        (41, 10, 41),  # a loop of more than four blocks pays
        (3, 1, 1),
        (5, 1, 5),
    ],
)
def test_executions_are_sent_in_parts_rather_than_looped_over_a_few_blocks(
    steps, unrolled, expected
):
    assert unlooped(steps, unrolled) == expected


def size(timing, unit=1, *, least=1, most=10, in_epoch=200, num_workers=1):
    return ExecutionSize(
        unit, least=least, most=most, in_epoch=in_epoch, num_workers=num_workers, timing=timing
    )


def test_executions_get_longer_once_steps_are_known_to_be_fast():
    chosen = size(StepTiming())
    chosen.note(0.0, 60)  # which took time to make ready
    assert chosen.steps == 1
    chosen.note(0.2, 60)
    assert chosen.steps == 1  # too short a time to tell
    chosen.note(0.4, 40)
    assert (chosen.steps, chosen.sizes) == (10, [10, 1])


def test_executions_of_slow_steps_stay_as_they_are():
    timing = StepTiming()
    chosen = size(timing)
    for second in range(300):
        chosen.note(second, 50)
    assert timing.seconds == pytest.approx(0.02)
    assert chosen.steps == 1


def test_executions_of_a_few_steps_stay_as_they_are():
    chosen = size(StepTiming())
    chosen.note(0.0, 40)
    chosen.note(0.4, 40)
    assert chosen.steps == 1


def test_what_is_known_of_a_step_serves_the_next_fit():
    assert size(StepTiming(steps=100, seconds=0.001)).steps == 10


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"unit": 4}, 8),
        ({"unit": 20}, 20),
        ({"most": 0}, 1),
        ({"in_epoch": None}, 10),
        ({"in_epoch": 40, "num_workers": 4}, 5),
        ({"in_epoch": 3}, 1),
    ],
)
def test_longer_executions_are_of_whole_ones_and_leave_each_worker_two(changes, steps):
    assert size(StepTiming(steps=100, seconds=0.001), **changes).steps == steps


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, [10, 5, 1]),
        ({"unit": 10}, [10, 1]),
        ({"least": 5}, [10, 5]),  # who listens is told of all that is left over at once
        ({"unit": 6, "least": 2}, [6, 2]),  # by workers with two devices
        ({"unit": 10, "in_epoch": 7}, [7, 1]),
        ({"unit": 10, "least": 10, "in_epoch": 7}, [10]),
        ({"unit": 10, "least": 2, "in_epoch": 7}, [6, 2]),
        ({"unit": 10, "least": 2, "in_epoch": 1}, [2]),
    ],
)
def test_what_is_left_over_is_sent_in_sizes_for_which_there_are_graphs(changes, sizes):
    assert size(StepTiming(steps=100, seconds=0.001), **{"unit": 5, **changes}).sizes == sizes


def test_a_graph_of_what_is_left_over_is_made_in_a_long_training():
    timing = StepTiming()
    for chosen in (size(timing, unit=10), size(timing, unit=10)):  # two calls of `fit`
        for _ in range(16):
            chosen.begin_epoch()
            assert chosen.sizes == [10, 1]
    chosen.begin_epoch()
    assert chosen.sizes == [10]


def test_several_workers_do_steps_side_by_side():
    timing = StepTiming()
    chosen = size(timing, num_workers=2)
    chosen.note(0.0, 100)
    chosen.note(1.0, 100)
    assert timing.seconds == pytest.approx(0.02)
