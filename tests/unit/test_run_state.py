"""What `kerasps launch` decides when something dies: events in, commands out, without processes."""

from __future__ import annotations

import random

import pytest

from kerasps.runtime.supervision import Notice
from kerasps.tools.cli.scripts.run_state import (
    End,
    EndHungWorker,
    EndScript,
    NoticeReceived,
    PSDied,
    RestartRun,
    RunState,
    Say,
    ScriptEnded,
    SignalReceived,
    TimePassed,
    WorkerDied,
)


class Played:
    """A `RunState`, what it has said, and what else it has commanded."""

    def __init__(self, max_restarts=3):
        self.state = RunState(max_restarts)
        self.now = 1000.0
        self.said = []
        self.commands = []

    def play(self, *events):
        """Hands in events, or lets as many seconds pass; returns the commands to do something."""
        before = len(self.commands)
        for event in events:
            if isinstance(event, (int, float)):
                self.now += event
                event = TimePassed()
            for command in self.state.handle(event, self.now):
                if isinstance(command, Say):
                    self.said.append(command.text)
                else:
                    self.commands.append(command)
        return self.commands[before:]


LOST_PS = NoticeReceived(Notice("lost", "ps", 0, 1.0))
LOST_WORKER = NoticeReceived(Notice("lost", "worker", 1, 1.0))
HUNG_PS = NoticeReceived(Notice("hung", "ps", 1, 1.0))
PS_DIED = PSDied(0, "the report of ps 0")


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([ScriptEnded(0)], 0),
        # An error of its own: a death would be seen within half a second.
        ([ScriptEnded(3), 0.6], 3),
        ([ScriptEnded(-2)], 130),
        ([SignalReceived(15), ScriptEnded(-15)], 143),
        ([SignalReceived(15), ScriptEnded(143)], 143),
        ([SignalReceived(2), PS_DIED, ScriptEnded(1)], 1),
        # Done, and the ps was not needed any more.
        ([PS_DIED, ScriptEnded(0)], 0),
        ([LOST_PS, ScriptEnded(0)], 0),
        # Workers are the cluster's business.
        ([WorkerDied("worker 0 died"), ScriptEnded(1), 0.6], 1),
    ],
)
def test_the_run_ends_with_the_script(events, code):
    assert Played().play(*events) == [End(code)]


@pytest.mark.parametrize(
    "events",
    [
        [ScriptEnded(-9)],
        [ScriptEnded(-15)],
        [ScriptEnded(143)],
        [PS_DIED, ScriptEnded(1)],
        [ScriptEnded(1), PS_DIED],
        [LOST_PS, ScriptEnded(1), PS_DIED],
        # The ps is back, or was never away, and the script could not go on.
        [LOST_PS, ScriptEnded(1), 0.6],
        [LOST_WORKER, ScriptEnded(1), 0.6],
        [HUNG_PS, ScriptEnded(1)],
        [PS_DIED, PSDied(1, "of ps 1"), ScriptEnded(-11)],
    ],
)
def test_a_loss_begins_the_run_anew(events):
    played = Played()
    assert played.play(*events) == [RestartRun()]
    assert "The run is started again, 1 of 3 in this hour. It resumes from" in played.said[-1]
    # What an earlier script said or suffered is not held against the next one.
    assert played.play(ScriptEnded(3), 0.6) == [End(3)]


def test_a_failure_waits_for_the_death_that_it_may_follow_from():
    played = Played()
    assert played.play(ScriptEnded(1), 0.4) == []
    assert played.play(PS_DIED) == [RestartRun()]


def test_a_script_that_does_not_end_without_its_ps_is_ended():
    played = Played()
    assert played.play(PS_DIED, 9.9) == []
    assert played.play(0.2) == [EndScript(15)]
    assert played.play(4.8) == []
    assert played.play(0.2) == [EndScript(9)]
    assert played.play(60) == []
    assert played.play(ScriptEnded(-9)) == [RestartRun()]


@pytest.mark.parametrize("events", [[SignalReceived(15)], [PS_DIED]])
def test_a_script_is_left_alone_where_nothing_follows(events):
    played = Played(max_restarts=3 if isinstance(events[0], SignalReceived) else 0)
    assert played.play(PS_DIED, *events, 60) == []


def test_a_hung_worker_is_for_the_cluster_and_a_hung_ps_ends_the_run():
    played = Played()
    notice = Notice("hung", "worker", 1, 1.0)
    assert played.play(NoticeReceived(notice)) == [EndHungWorker(notice)]
    assert played.play(HUNG_PS, HUNG_PS, 10.1) == [EndScript(15)]
    assert played.said == [
        "ps 1 does not answer. When the script has ended, the run is started again, 1 of 3 in this "
        "hour."
    ]


def test_restarts_are_counted_per_task_and_hour_with_growing_pauses():
    played = Played()
    assert played.play(ScriptEnded(-9)) == [RestartRun()]
    assert played.play(ScriptEnded(-9), 0.9) == []
    assert "started again in 1 s, 2 of 3 in this hour" in played.said[-1]
    assert played.play(0.2) == [RestartRun()]
    # Another task has restarts of its own.
    assert played.play(PS_DIED, ScriptEnded(1)) == [RestartRun()]
    assert played.play(ScriptEnded(-9), 1.9) == []
    assert played.play(0.2) == [RestartRun()]
    assert played.play(ScriptEnded(-6)) == [End(134)]
    assert played.said[-2:] == [
        "the script has ended (signal SIGABRT). The run is not started again: 3 restarts within an "
        "hour.",
        "this was the first failure:\nthe script has ended (signal SIGKILL)",
    ]


def test_after_an_hour_there_are_restarts_again():
    played = Played(max_restarts=1)
    assert played.play(ScriptEnded(-9), 3599, ScriptEnded(0)) == [RestartRun(), End(0)]
    played = Played(max_restarts=1)
    assert played.play(ScriptEnded(-9), 3600, ScriptEnded(-9)) == [RestartRun(), RestartRun()]


def test_the_first_failure_is_said_last_with_its_log_lines():
    played = Played(max_restarts=1)
    played.play(WorkerDied("worker 0 died. It is started again.\nits last words"))
    played.play(PS_DIED, ScriptEnded(1), PS_DIED)
    assert played.said[-1].startswith("ps 0 died. The run is not started again: 1 restart within")
    assert played.play(ScriptEnded(1)) == [End(1)]
    assert played.said[-1] == (
        "this was the first failure:\nworker 0 died. It is started again.\nits last words"
    )


def test_without_restarts_a_death_is_said_once_and_nothing_else():
    played = Played(max_restarts=0)
    assert played.play(PS_DIED, ScriptEnded(5)) == [End(5)]
    assert played.said == [
        "ps 0 died. The run is not started again: restarts are turned off.\nthe report of ps 0"
    ]
    played = Played(max_restarts=0)
    assert played.play(ScriptEnded(-9)) == [End(137)]
    assert played.said == []


def test_a_signal_during_the_pause_ends_all():
    played = Played()
    played.play(ScriptEnded(-9), ScriptEnded(-9))
    assert played.play(SignalReceived(15)) == [End(143)]
    played = Played()
    played.play(ScriptEnded(-9), ScriptEnded(-9))
    # Nobody waits for a ps that dies meanwhile, but it is told.
    assert played.play(PS_DIED) == []
    assert "ps 0 died. It is started again with the others." in played.said[-1]
    assert played.play(SignalReceived(2)) == [End(130)]


def test_tasks_that_end_with_the_launcher_are_not_spoken_of():
    played = Played()
    played.play(SignalReceived(15), PS_DIED, WorkerDied("worker 0 died"), ScriptEnded(143))
    assert played.said == []


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_a_script_that_ends_is_followed_by_one_thing(seed):
    """After the end of a script comes one start or one end, and neither before it."""
    chance = random.Random(seed)
    played = Played(max_restarts=chance.choice([0, 1, 3]))
    others = [PS_DIED, PSDied(1, "of ps 1"), LOST_PS, LOST_WORKER, HUNG_PS, WorkerDied("w"), 0.1, 7]
    for _ in range(8):
        for _ in range(chance.randrange(6)):
            commands = played.play(chance.choice(others))
            assert not any(isinstance(command, (RestartRun, End)) for command in commands)
        if chance.random() < 0.1:
            played.play(SignalReceived(chance.choice([1, 2, 15])))
        commands = played.play(ScriptEnded(chance.choice([0, 1, 143, -9, -15])))
        commands += played.play(*[0.25] * 2, *[chance.choice([0.1, 9]) for _ in range(5)], 40)
        last = [command for command in commands if isinstance(command, (RestartRun, End))]
        assert len(last) == 1
        if isinstance(last[0], End):
            return
