"""Checks of the epoch's state, and the log that its errors carry."""

from __future__ import annotations

import pytest

from kerasps.training.epoch.admission import Bounded, Synchronous
from kerasps.training.epoch.epoch_events import (
    EpochBegan,
    Execution,
    ExecutionsDone,
    JoinedUpdates,
    PassBegan,
    Report,
    ResultCollected,
    SessionBegan,
    SplitOpened,
    SplitPosition,
    StepsAsked,
    WorkerEnd,
    WorkerEnded,
)
from kerasps.training.epoch.epoch_log import EpochLog
from kerasps.training.epoch.epoch_state import EpochState
from kerasps.training.epoch.splits import SplitLedger, SplitStatus
from kerasps.training.epoch.worker_state import WorkerStatus


class Header:
    first_step = 7

    def __repr__(self):
        return "header"


def running_state(admission=None, num_steps=2):
    """Two workers with 20 batches each, of which each has done an execution and runs another."""
    state = EpochState(2, executions_ahead=2, collect_interval=1.0, admission=admission)
    state.handle(PassBegan(2))
    state.handle(EpochBegan())
    for _ in range(4):
        state.handle(StepsAsked(Execution(num_steps, Header(), ["batch"] * num_steps)))
    for worker in range(2):
        state.handle(SessionBegan(worker, False))
        state.handle(SplitOpened(worker, 20))
    for worker in range(2):
        state.handle(JoinedUpdates(worker))
    for worker in range(2):
        state.handle(ExecutionsDone(worker, 1, at=0.5))
    state.validate()
    return state


def lose_an_execution(state):
    state.workers[0].running.clear()


def put_an_execution_in_two_places(state):
    state.workers[0].uncollected[0] = state.workers[0].running[0]


def count_a_batch_twice(state):
    state.splits[0].confirm(1)


def give_a_batch_out_twice(state):
    state.splits[0].give_out(-1)


def count_more_than_there_is(state):
    state.splits[0].confirm(21)


def give_out_more_than_there_is(state):
    state.splits[0].give_out(21)


def release_a_split_that_is_read(state):
    state.splits[0].release()


def read_a_split_twice(state):
    state.workers[1].split = 0


def share_a_split_with_an_end(state):
    state.workers[0].shares = True


def lose_a_worker_that_holds_something(state):
    state.workers[0].status = WorkerStatus.LOST


def lose_a_worker_and_know_it_as_alive(state):
    state.handle(WorkerEnded(0, WorkerEnd.FAILED))
    state.workers.note_alive(0)


def await_a_worker_that_runs(state):
    state.workers[0].status = WorkerStatus.AWAITED


def read_without_a_split(state):
    state.handle(ResultCollected(0, 2, "sum", at=1.0))
    state.workers.release(0)


def fetch_results_that_are_not_there(state):
    state.workers[0].uncollected.clear()
    state.workers[0].is_collecting = True


def apply_more_than_was_pushed(state):
    object.__setattr__(state.workers[0].running[0], "applied", (3, 0))


def count_fewer_than_were_left_out(state):
    state.workers[0].not_applied = (1, 0)


def bind_for_nothing(state):
    state.splits.put_back(0, [Execution(2, None)])


@pytest.mark.parametrize(
    "defect",
    [
        lose_an_execution,
        put_an_execution_in_two_places,
        count_a_batch_twice,
        give_a_batch_out_twice,
        count_more_than_there_is,
        give_out_more_than_there_is,
        release_a_split_that_is_read,
        read_a_split_twice,
        share_a_split_with_an_end,
        lose_a_worker_that_holds_something,
        lose_a_worker_and_know_it_as_alive,
        await_a_worker_that_runs,
        read_without_a_split,
        fetch_results_that_are_not_there,
        apply_more_than_was_pushed,
        count_fewer_than_were_left_out,
        bind_for_nothing,
    ],
)
def test_a_defect_is_found_and_its_error_carries_the_last_events(defect):
    state = running_state()
    defect(state)
    with pytest.raises(AssertionError) as caught:
        state.validate()
    (note,) = caught.value.__notes__
    assert "ExecutionsDone(worker=1, count=1, at=0.5) -> Report(" in note


def test_two_parts_of_a_split_do_not_overlap():
    state = running_state(num_steps=1)
    state.splits.divide(4)
    # Nobody reads the part, and it begins before its first half ends.
    state.splits[2].finish()
    state.splits[2].confirm(-1)
    with pytest.raises(AssertionError, match="the same batches"):
        state.splits.validate([1, 1, 0])
    assert state.splits[2].status is SplitStatus.READ


def test_a_part_that_is_read_to_its_end_may_end_where_another_begins():
    parts = (SplitPosition(0, 0, 18), SplitPosition(0, 37, 75), SplitPosition(0, 37, 37))
    SplitLedger(1, parts).validate([0, 0, 0])


@pytest.mark.parametrize(
    ("admission", "defect", "match"),
    [
        (Bounded(4), lambda bounded: bounded.give(0, 1), "miscounted"),
        (Bounded(4), lambda bounded: setattr(bounded, "_max_ahead", 1), "too far ahead"),
        (Synchronous(), lambda joints: joints.stop_waiting_for(0), "no update waits for worker 0"),
        (Synchronous(), lambda joints: joints.begin([0]), "expected"),
    ],
    ids=["miscounts", "allows too much", "leaves with steps", "expects who is there"],
)
def test_a_defect_of_the_admission_is_found(admission, defect, match):
    state = running_state(admission)
    defect(admission)
    with pytest.raises(AssertionError, match=match):
        state.validate()


def test_an_event_that_cannot_be_raises_an_error_that_carries_the_last_events():
    state = running_state()
    with pytest.raises(IndexError) as caught:
        state.handle(ExecutionsDone(0, 100, at=0.6))
    note = caught.value.__notes__[0]
    assert note.splitlines()[0] == "The last 15 of 15 events of the epoch's state:"
    assert note.splitlines()[-1] == "15 ExecutionsDone(worker=0, count=100, at=0.6)"


def test_the_history_has_events_and_commands_and_neither_batches_nor_results():
    state = running_state()
    state.handle(ResultCollected(0, 2, "the sum", at=1.0))
    lines = state.history().splitlines()
    assert len(lines) == 1 + 15
    assert lines[3] == "3 StepsAsked(num_steps=2, header=header)"
    sent = "Send(worker=0, num_steps=2, header=header, applied=())"
    assert f"-> {sent}; {sent}" in lines[8]
    assert lines[-1].startswith("15 ResultCollected(worker=0, steps=2, at=1.0) -> Report(")
    assert "batch'" not in state.history()
    assert "the sum" not in state.history()


def test_the_log_keeps_the_last_thousand_events():
    log = EpochLog()
    for number in range(2500):
        log.add_event(ExecutionsDone(0, number, at=0.0))
        log.add_commands([Report()])
    lines = log.text().splitlines()
    assert lines[0] == "The last 1000 of 2500 events of the epoch's state:"
    assert lines[1].startswith("1501 ExecutionsDone(worker=0, count=1500, at=0.0) -> Report(")
    assert len(lines) == 1001
    assert len(log.text(10).splitlines()) == 11
