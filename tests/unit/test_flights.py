import threading

import pytest

from kerasps.variables import flights


@pytest.fixture(autouse=True)
def no_other_threads(monkeypatch):
    monkeypatch.setattr(flights, "_aboard", set())


def test_the_end_of_a_process_waits_for_calls_in_progress():
    is_aboard, may_end = threading.Event(), threading.Event()

    def call():
        with flights.aboard(), flights.aboard():
            is_aboard.set()
            may_end.wait()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    is_aboard.wait()
    flights.wait_for_calls(0.0)  # ends at its limit
    assert thread.is_alive()
    threading.Timer(0.0, may_end.set).start()
    flights.wait_for_calls(600.0)
    assert thread.ident not in flights._aboard


def test_a_thread_that_is_aboard_does_not_wait_for_itself():
    with flights.aboard():
        flights.wait_for_calls(600.0)
    assert threading.get_ident() not in flights._aboard
