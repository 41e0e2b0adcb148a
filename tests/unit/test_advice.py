"""Advice follows from the numbers of a status."""

import logging

import pytest

from kerasps.tools.monitoring.advice import EXECUTION_S, advice_for, are_too_short, worth_below
from kerasps.tools.monitoring.reader import StatusReader
from kerasps.tools.monitoring.status import ProcessUsage, RunStatus, WorkerRunStatus, status_of


def status(rates=(200.0, 200.0), cpu=0.5, seconds=60.0, **fields):
    workers = tuple(
        WorkerRunStatus(number, f"host:{number}", "connected", 1.0, steps_per_second=rate)
        for number, rate in enumerate(rates)
    )
    coordinator = None if cpu is None else ProcessUsage(1, 1, 1.0, cpu)
    values = {
        "state": "training",
        "epoch": 0,
        "steps": 1000,
        "steps_total": 1000,
        "steps_per_second": sum(rates),
        "seconds": seconds,
        "workers": workers,
        "ps": (),
        "tables": (),
        "coordinator": coordinator,
    }
    return RunStatus(**(values | fields))


def test_short_executions_of_several_workers():
    # An execution takes 5 ms, and a call without steps 2.5 ms unless another time is measured.
    (advice,) = advice_for(status(), 1)
    assert "steps_per_execution=10" in advice
    assert "waits for the coordinator some 50% of the time" in advice
    (advice,) = advice_for(status(), 1, 0.002)
    assert "waits for the coordinator some 24% of the time" in advice
    (advice,) = advice_for(status(), 1, 0.02)
    assert "waits for the coordinator some 100% of the time" in advice
    assert advice_for(status(), 1, 0.0015) == ()


def test_a_status_a_trace_and_a_plan_have_one_rule():
    assert are_too_short(1, 0.2)
    assert are_too_short(9, 0.2)
    assert not are_too_short(1, 0.19)
    assert not are_too_short(10, 0.9)
    assert not are_too_short(0, 0.9)
    assert worth_below(EXECUTION_S) == pytest.approx(0.0125)


@pytest.mark.parametrize(
    ("fields", "execution_steps"),
    [
        ({"rates": (200.0,)}, 1),  # its executions wait for it
        ({"rates": (200.0, 0.0)}, 1),  # the other one is lost
        ({"rates": ()}, 0),
        ({"rates": (79.0, 79.0)}, 1),
        ({"rates": (200.0, 200.0)}, 10),
        ({"rates": (200.0, 200.0), "seconds": 3.0}, 1),
        ({"cpu": None}, 1),  # a worker that drives its own steps
    ],
)
def test_no_advice_where_it_would_not_pay(fields, execution_steps):
    assert advice_for(status(**fields), execution_steps) == ()


def test_advice_is_a_part_of_the_status():
    advised = status(advice=("Do this.",))
    assert "advice: Do this." in str(advised)
    assert status_of(advised.as_dict()).advice == ("Do this.",)
    # Of an earlier version.
    assert status_of({k: v for k, v in advised.as_dict().items() if k != "advice"}).advice == ()


def test_it_is_logged_once_after_a_long_fit(caplog, monkeypatch):
    reader = StatusReader(host=None, local_tasks=None)
    monkeypatch.setattr(reader, "read", lambda: status(advice=("Do this.",)))
    with caplog.at_level(logging.WARNING, "kerasps"):
        reader.advise(10.0)
        assert caplog.messages == []
        reader.advise(40.0)
        reader.advise(40.0)
    assert caplog.messages == ["This training could be faster. Do this."]
