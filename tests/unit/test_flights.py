import threading

import pytest

from kerasps.runtime import calls
from kerasps.variables.lanes import flights


@pytest.fixture(autouse=True)
def no_other_threads(monkeypatch):
    monkeypatch.setattr(calls, "_calling", set())


def test_the_end_of_a_process_waits_for_calls_in_progress():
    is_aboard, may_end = threading.Event(), threading.Event()

    def call():
        with flights.aboard(), flights.aboard():
            is_aboard.set()
            may_end.wait()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    is_aboard.wait()
    calls.wait_for_calls(0.0)  # ends at its limit
    assert thread.is_alive()
    threading.Timer(0.0, may_end.set).start()
    calls.wait_for_calls(600.0)
    assert thread.ident not in calls._calling


def test_the_end_of_a_process_waits_for_calls_beside_a_flight_too():
    with flights.aboard(), calls.separate_executor():
        assert calls._calling == {threading.get_ident()}
    with calls.separate_executor():
        with calls.calling():
            pass
        assert calls._calling == {threading.get_ident()}
    assert not calls._calling


def test_a_thread_that_is_aboard_does_not_wait_for_itself():
    with flights.aboard():
        calls.wait_for_calls(600.0)
    assert threading.get_ident() not in calls._calling
