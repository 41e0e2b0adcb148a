import contextlib
import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf

from kerasps import _compat
from kerasps.runtime import calls
from kerasps.training.calls.coordinator_port import CoordinatorPort
from kerasps.training.sessions import session_flights
from kerasps.training.sessions.session_flights import SessionFlights
from kerasps.variables.lanes import flights
from support.process_checks import wait_for


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


def test_the_end_of_a_process_waits_for_calls_of_threads_of_others():
    queue, begins = tf.queue.FIFOQueue(1, tf.int32), threading.Event()

    def call():
        begins.set()
        queue.dequeue()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    begins.wait()
    wait_for(calls._others_call, what="the call")
    calls.wait_for_calls(0.0)  # ends at its limit
    threading.Timer(0.0, lambda: queue.enqueue(1)).start()
    calls.wait_for_calls(600.0)
    assert not calls._others_call()


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


def test_a_session_can_be_cancelled_where_each_thread_has_a_context(monkeypatch):
    # As in TensorFlow 2.23; 2.21 has one context for the whole process.
    contexts, seen = threading.local(), []

    class Context:
        def __init__(self, manager):
            self.manager = manager

        def __enter__(self):
            contexts.manager = self.manager

        def __exit__(self, *error):
            contexts.manager = None

    def context():
        return getattr(contexts, "manager", None)

    class Watch:
        """Starts a session in its thread, as `WorkerWatch` does."""

        def __init__(self, *unused, start):
            self.start_all = lambda: start(0)

    def start(session, worker):
        thread = threading.Thread(target=session, args=(worker,))
        thread.start()
        thread.join()

    monkeypatch.setattr(_compat, "CancellationManager", object)
    monkeypatch.setattr(_compat, "CancellationManagerContext", Context)
    monkeypatch.setattr(_compat, "cancellation_context", context)
    monkeypatch.setattr(session_flights, "WorkerWatch", Watch)
    port = SimpleNamespace(
        start=start,
        cancellable=CoordinatorPort.cancellable,
        cancellable_calls=CoordinatorPort.cancellable_calls,
    )
    flights = object.__new__(SessionFlights)
    flights._port, flights._channel = port, None
    flights._membership = SimpleNamespace(in_use=contextlib.nullcontext, lost_ps=None)
    flights._function = SimpleNamespace(load=lambda: None, store=lambda: None)
    flights._lanes = SimpleNamespace(all=[])
    flights._runner = SimpleNamespace(run=lambda *arguments: seen.append(context()))
    sessions = SimpleNamespace(
        end=lambda: None, wait_until_idle=lambda seconds: True, has_failed=False, error=None
    )
    flight = SimpleNamespace(wake=None, wait_until_over=lambda *unused: None)
    flights._fly(sessions, {}, flight)
    assert [manager is not None for manager in seen] == [True]
