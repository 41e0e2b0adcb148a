"""Who is there, as a state: events in, what is new out."""

from __future__ import annotations

import pytest

from kerasps.cluster.members.presence import Presence, Status
from kerasps.runtime.probe import Answer

WORKER, OTHER, PS = ("worker", 0), ("worker", 1), ("ps", 0)
ADDRESSES = {WORKER: "host0:1", OTHER: "host1:1", PS: "host2:1"}
ALL_SERVE = dict.fromkeys(ADDRESSES, Answer.SERVES)
LIMIT_S = 10.0


@pytest.fixture
def presence():
    return Presence(ADDRESSES, limit_s=LIMIT_S, now=0.0)


def statuses(noticed):
    return [(one.task, one.before, one.status) for one in noticed]


def hear(presence, now, **answers):
    """One question to all: those that are not named serve."""
    by_name = {"worker": WORKER, "other": OTHER, "ps": PS}
    presence.tick(now, 1.0)
    return presence.hear({**ALL_SERVE, **{by_name[n]: a for n, a in answers.items()}}, now)


@pytest.mark.parametrize("answer", [Answer.IS_SILENT, Answer.IS_OTHER])
def test_who_does_not_answer_for_the_limit_hangs_and_comes_back(presence, answer):
    for now in range(1, 11):
        assert hear(presence, float(now), worker=answer) == []
    (noticed,) = hear(presence, 11.0, worker=answer)
    assert (noticed.task, noticed.status, noticed.after_s) == (WORKER, Status.HUNG, 10.0)
    assert noticed.reason == answer.value
    assert presence.connected.keys() == {OTHER, PS}
    assert hear(presence, 12.0, worker=answer) == []
    assert not presence.back
    assert hear(presence, 13.0) == []
    assert presence.back == {WORKER: "host0:1"}
    assert statuses(presence.mark_connected([WORKER], 14.0)) == [
        (WORKER, Status.HUNG, Status.CONNECTED)
    ]
    assert presence.generation(WORKER) == 1
    assert presence.connected.keys() == ADDRESSES.keys()
    assert hear(presence, 15.0, worker=answer) == []  # a new silence is counted anew


def test_an_answer_in_between_begins_the_silence_anew(presence):
    for now in range(1, 40):
        answer = Answer.SERVES if now % 9 == 0 else Answer.IS_SILENT
        assert hear(presence, float(now), worker=answer) == []


def test_who_refuses_does_not_hang(presence):
    for now in range(1, 40):
        assert hear(presence, float(now), worker=Answer.REFUSES) == []


def test_who_was_lost_to_a_call_and_does_not_answer_hangs(presence):
    presence.lose(WORKER, 8.0, "ping timeout")
    for now in range(1, 11):
        assert hear(presence, float(now), worker=Answer.IS_SILENT) == []
    assert statuses(hear(presence, 11.0, worker=Answer.IS_SILENT)) == [
        (WORKER, Status.LOST, Status.HUNG)
    ]
    hear(presence, 13.0)
    assert presence.back.keys() == {WORKER}


def test_a_process_that_was_asleep_itself_blames_nobody(presence):
    hear(presence, 1.0)
    assert hear(presence, 1000.0, worker=Answer.IS_SILENT, ps=Answer.IS_SILENT) == []
    assert hear(presence, 1001.0) == []
    assert presence.status(WORKER) is Status.CONNECTED


def test_silence_is_counted_from_the_first_question_without_an_answer(presence):
    hear(presence, 1.0)
    for now in (3.0, 5.0, 7.0, 9.0, 11.0, 12.9):  # it may have been stopped just before 3.0
        presence.tick(now, 2.0)
        assert presence.hear({**ALL_SERVE, PS: Answer.IS_SILENT}, now) == []
        assert presence.has_absent_tasks  # so it is asked often
    presence.tick(13.0, 2.0)
    (noticed,) = presence.hear({**ALL_SERVE, PS: Answer.IS_SILENT}, 13.0)
    assert (noticed.task, noticed.after_s) == (PS, 10.0)


def test_a_process_that_is_held_up_while_it_asks_blames_nobody(presence):
    silent = {**ALL_SERVE, PS: Answer.IS_SILENT}
    for now in range(1, 6):
        presence.tick(now * 30.0, 1.0)
        assert presence.hear(silent, now * 30.0 + 25.0, 1.0) == []
    presence.hear(ALL_SERVE, 300.0, 1.0)
    assert presence.status(PS) is Status.CONNECTED


def test_a_ps_that_hangs_stays_known_and_is_there_when_it_answers(presence):
    for now in range(1, 12):
        noticed = hear(presence, float(now), ps=Answer.IS_SILENT)
    assert statuses(noticed) == [(PS, Status.CONNECTED, Status.HUNG)]
    assert PS in presence.connected
    assert not presence.has_all_ps
    assert statuses(hear(presence, 12.0)) == [(PS, Status.HUNG, Status.CONNECTED)]
    assert presence.has_all_ps
    assert not presence.back


def test_a_lost_worker_is_taken_back_when_it_answers_whatever_others_do(presence):
    assert statuses(presence.lose(WORKER, 1.0, "reset")) == [
        (WORKER, Status.CONNECTED, Status.LOST)
    ]
    assert statuses(presence.lose(OTHER, 1.0, "reset")) == [(OTHER, Status.CONNECTED, Status.LOST)]
    assert presence.lose(WORKER, 1.1, "again") == []
    hear(presence, 1.5, worker=Answer.REFUSES)
    assert not presence.back  # calls that are on their way end first
    hear(presence, 2.0, worker=Answer.REFUSES)
    assert presence.back.keys() == {OTHER}
    presence.mark_connected([OTHER], 2.1)
    assert presence.of("worker", Status.CONNECTED) == [1]
    assert presence.has_absent_tasks
    hear(presence, 3.0)
    assert presence.back.keys() == {WORKER}


def test_others_do_not_wait_for_a_worker_that_is_silent(presence):
    answers = {WORKER: Answer.IS_SILENT, OTHER: Answer.SERVES, PS: Answer.IS_SILENT}
    assert statuses(presence.count_silent_as_hung(answers, 1.0)) == [
        (WORKER, Status.CONNECTED, Status.HUNG)
    ]


def test_a_worker_that_leaves_is_given_up_when_it_holds_nothing(presence):
    assert statuses(presence.begin_leaving(WORKER, 1.0)) == [
        (WORKER, Status.CONNECTED, Status.LEAVING)
    ]
    assert presence.begin_leaving(WORKER, 1.1) == []
    assert WORKER in presence.connected
    assert statuses(presence.left(WORKER, 2.0)) == [(WORKER, Status.LEAVING, Status.LEFT)]
    assert presence.left(WORKER, 2.1) == []
    assert WORKER not in presence.connected
    hear(presence, 3.0, worker=Answer.REFUSES)
    assert not presence.back
    hear(presence, 4.0)  # another at its place
    assert presence.back.keys() == {WORKER}


def test_a_worker_that_may_end_is_not_lost_when_a_call_finds_it_gone(presence):
    presence.begin_leaving(WORKER, 1.0)
    presence.let_end(WORKER)
    lost = presence.lose(WORKER, 2.0, "connection refused")
    assert statuses(lost) == [(WORKER, Status.LEAVING, Status.LEFT)]
    assert presence.left(WORKER, 2.1) == []
    presence.mark_connected([WORKER], 3.0)
    lost = presence.lose(WORKER, 4.0, "connection refused")
    assert statuses(lost) == [(WORKER, Status.CONNECTED, Status.LOST)]


def test_a_worker_that_leaves_and_cannot_finish_has_left(presence):
    for is_known_to_leave in (True, False):
        if is_known_to_leave:
            presence.begin_leaving(WORKER, 1)
        (noticed,) = presence.give_up_leaving(WORKER, 2, "no connection")
        assert (noticed.status, noticed.reason) == (Status.LEFT, "no connection")
        assert WORKER not in presence.connected
        assert presence.give_up_leaving(WORKER, 2, "again") == presence.lose(WORKER, 2, "") == []
        presence.hear({WORKER: Answer.SERVES}, 5)
        presence.tick(5, 1)
        assert WORKER in presence.back
        presence.mark_connected([WORKER], 5)


def test_a_worker_may_move_and_others_may_join(presence):
    new = ("worker", 2)
    moved = presence.move({WORKER: "host0:1", OTHER: "host9:1", new: "host3:1"}, 1.0)
    assert statuses(moved) == [(OTHER, Status.CONNECTED, Status.LOST)]
    assert "host9:1" in moved[0].reason
    assert presence.status(new) is Status.JOINING
    assert presence.connected.keys() == {WORKER, PS}
    presence.hear({**ALL_SERVE, new: Answer.SERVES}, 1.5)
    assert presence.back == {new: "host3:1"}
    presence.tick(2.0, 1.0)
    assert presence.back == {OTHER: "host9:1", new: "host3:1"}
    presence.mark_connected([new], 3.0)
    assert presence.of("worker", Status.CONNECTED) == [0, 2]
    assert presence.move({WORKER: "host0:1", OTHER: "host9:1", new: "host3:1"}, 4.0) == []


def test_the_answer_of_a_task_that_is_not_known_says_nothing(presence):
    assert presence.hear({("worker", 7): Answer.SERVES}, 1.0) == []
