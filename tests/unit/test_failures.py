"""What becomes of a session that failed, and what is told of its error."""

from __future__ import annotations

import contextlib
import socket
import types

import pytest
import tensorflow as tf

import kerasps
from kerasps.runtime import errors as failures
from kerasps.step.tracing.state import Header
from kerasps.training.calls import session_failures
from kerasps.training.calls.session_failures import Verdict
from kerasps.training.calls.worker_recovery import TryAgain
from kerasps.training.epoch.epoch_events import Execution
from kerasps.training.sessions.session_runner import SessionRunner


class Members:
    """Who is there, as a session asks."""

    def __init__(self, *there):
        self.there, self.lost_ps = {*there}, None

    def has_worker(self, worker):
        return worker in self.there

    leaving = frozenset()

    def give_up_leaving(self, worker, reason):
        if worker in self.leaving:
            self.lose(worker, reason)
        return worker in self.leaving

    def lose(self, worker, reason):
        self.there.discard(worker)


@pytest.mark.parametrize(
    ("is_silent", "message", "told"),
    [
        (True, r"does not answer, and counts as lost.*within 7 seconds.*silence \(Unav", "hung"),
        (False, "is gone, and with it its variables.*Received: UnavailableError: closed", "lost"),
    ],
)
def test_a_ps_that_hangs_is_told_from_one_that_is_gone(monkeypatch, is_silent, message, told):
    monkeypatch.setenv("KERASPS_HANG_TIMEOUT", "7")
    notices = []
    monkeypatch.setattr(failures, "tell_supervisor", lambda *notice: notices.append(notice))
    error = tf.errors.UnavailableError(None, None, "closed /job:ps/replica:0/task:0")
    # The kernel accepts connections for a process that is stopped. A port at which nobody listens
    # refuses them.
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        if is_silent:
            holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        host = types.SimpleNamespace(
            description=kerasps.ClusterDescription({"ps": (address,)}, "chief", 0),
            after_ps_loss="Start it again.",
            hangs=lambda ps: False,
        )
        with (
            pytest.raises(kerasps.PSLostError, match=f"ps 0 at {address} {message}") as caught,
            failures.translated_errors(host),
        ):
            raise error
    assert (caught.value.task_type, caught.value.task_index) == ("ps", 0)
    assert notices == [(told, "ps", 0)]


@pytest.mark.parametrize(
    "where", ["RemoteExecuteNode::RunAsync", "RecvFromRemoteAsync is cancelled"]
)
def test_what_was_cancelled_without_saying_where_is_tried_again(monkeypatch, where):
    monkeypatch.setattr(session_failures, "answers", lambda device: True)
    sessions = session_failures.SessionFailures(Members(0, 1))
    error = tf.errors.CancelledError(None, None, where)
    assert session_failures.may_be_loss(error)
    again, fail = Verdict.TRY_AGAIN, Verdict.FAIL
    assert [sessions.verdict(error, 1) for _ in range(3)] == [again, again, fail]
    # What another worker met, or this one before it did something, does not count.
    assert sessions.verdict(error, 0) is again
    sessions.forget(1)
    assert sessions.verdict(error, 1) is again


def executions(*first_steps):
    return [Execution(2, Header(step, [])) for step in first_steps]


def test_the_third_same_error_of_the_same_steps_is_told_though_others_are_done(monkeypatch):
    monkeypatch.setattr(session_failures, "answers", lambda device: True)
    sessions = session_failures.SessionFailures(Members(0, 1))
    error = tf.errors.CancelledError(None, None, "RecvFromRemoteAsync is cancelled")
    other = tf.errors.UnavailableError(None, None, "Socket closed")
    again, fail = Verdict.TRY_AGAIN, Verdict.FAIL
    assert sessions.verdict(error, 1, executions(8, 10)) is again
    sessions.forget(1)  # it has done some steps
    assert sessions.verdict(error, 0, executions(8, 12)) is again
    monkeypatch.setattr(session_failures._compat, "is_worker_failure", lambda error: True)
    assert sessions.verdict(other, 1, executions(8)) is again
    assert sessions.verdict(error, 1, executions(10)) is again
    assert sessions.verdict(error, 1, executions(8)) is fail
    assert "3 times for the same steps (from step 8 on)" in error.__notes__[0]
    sessions.begin_epoch()
    assert sessions.verdict(error, 1, executions(8)) is again


def test_steps_that_lose_each_worker_end_the_training():
    members = Members(0)
    sessions = session_failures.SessionFailures(members)
    error = tf.errors.UnavailableError(None, None, "Socket closed")
    verdicts = [sessions.verdict(error, 1, executions(first, 6)) for first in (4, 5, 7, 8, 9)]
    absent = Verdict.WORKER_IS_ABSENT
    assert verdicts == [*[absent] * 4, Verdict.LOSES_WORKERS]
    assert sessions.verdict(error, 1) is absent  # it had no steps
    told = session_failures.loses_workers_error("worker 1 at a:1", executions(6, 8), "closed")
    assert isinstance(told, kerasps.WorkerLostError)
    assert "same steps (the 4 from step 6 on); the last was worker 1 at a:1" in str(told)


def test_a_request_that_did_not_arrive_is_made_again(monkeypatch):
    monkeypatch.setattr(session_failures, "answers", lambda device: True)
    sessions = session_failures.SessionFailures(Members(0, 1))
    error = tf.errors.InternalError(None, None, "Unable to parse request\n\t [[tensors_0/_2]]")
    again, fail = Verdict.TRY_AGAIN, Verdict.FAIL
    assert [sessions.verdict(error, 1) for _ in range(3)] == [again, again, fail]
    other = tf.errors.InternalError(None, None, "of some kind")
    assert sessions.verdict(other, 1) is fail


def test_who_does_not_answer_is_lost_whatever_the_error_says(monkeypatch):
    monkeypatch.setattr(session_failures, "answers", lambda device: "worker" not in device)
    members = Members(0, 1)
    sessions = session_failures.SessionFailures(members)
    for error in (
        tf.errors.CancelledError(None, None, "RecvFromRemoteAsync is cancelled"),
        tf.errors.InternalError(None, None, "of some kind"),
        tf.errors.UnavailableError(None, None, "/job:worker/replica:0/task:0 went away"),
    ):
        members.there = {0, 1}
        assert sessions.verdict(error, 1) is Verdict.WORKER_IS_ABSENT
        assert members.there == {0}


def test_who_is_about_to_leave_is_given_up_whatever_the_error_says(monkeypatch):
    monkeypatch.setattr(session_failures, "answers", lambda _: True)
    members = Members(0, 1)
    members.leaving = {1}
    sessions = session_failures.SessionFailures(members)
    # Of a ps that has no connection to the worker yet, and gets none.
    error = tf.errors.UnavailableError(
        None,
        None,
        "failed to connect to all addresses\nAdditional GRPC error information from remote target "
        "/job:ps/replica:0/task:0:",
    )
    assert sessions.verdict(error, 1) is Verdict.WORKER_IS_ABSENT
    assert not members.has_worker(1)
    poisoned = tf.errors.InternalError(None, None, "found to be poisoned")
    assert sessions.verdict(poisoned, 1) is Verdict.WORKER_IS_ABSENT


def test_an_error_of_what_a_worker_does_is_told_at_once(monkeypatch):
    monkeypatch.setattr(session_failures, "answers", lambda device: True)
    sessions = session_failures.SessionFailures(Members(0, 1))
    assert sessions.verdict(tf.errors.InternalError(None, None, "of a step"), 1) is Verdict.FAIL


def test_what_an_operation_says_is_what_is_told():
    node = "Detected at node assert/Assert defined at (most recent call last):\n"
    made_at = f"{node}<stack traces unavailable>\n"
    traced = f'{node}  File "a.py", line 3, in f\n\n  File "b.py"\n'
    way = "\t [[{{node assert/Assert}}]]\n\t [[IteratorGetNext]]"
    message = (
        f"Graph execution error:\n\n{made_at * 3}{traced}2 root error(s) found.\n"
        f"  (0) INVALID_ARGUMENT:  not that id\n{way}"
    )
    told = failures.cleaned(tf.errors.InvalidArgumentError(None, None, message))
    assert told.message == "not that id\nIn operation 'assert/Assert'."
    assert told.__context__.message == message


@pytest.mark.parametrize("is_there", [True, False])
def test_a_ps_is_not_gone_for_being_named_in_the_error_of_a_lost_worker(monkeypatch, is_there):
    monkeypatch.setattr(failures, "ps_is_there", lambda host, ps: is_there)
    cluster = types.SimpleNamespace(jobs={"ps": ["a:1", "b:2"]})
    host = types.SimpleNamespace(description=cluster, after_ps_loss="", hangs=lambda ps: False)
    monkeypatch.setattr(failures, "connected_host", lambda: host)
    error = tf.errors.UnavailableError(
        None,
        None,
        "Failed copying input tensor from /job:localhost to /job:ps/replica:0/task:1: refused\n"
        "Additional GRPC error information from remote target /job:worker/replica:0/task:0 while "
        "calling /tensorflow.eager.EagerService/Enqueue:",
    )
    with (
        pytest.raises(tf.errors.UnavailableError if is_there else kerasps.PSLostError),
        failures.naming_lost_ps,
    ):
        raise error


@pytest.mark.parametrize(
    ("is_over", "has_failed"), [(False, False), (True, False), (False, True)], ids=str
)
def test_a_session_starts_again_and_says_so_while_the_flight_goes_on(caplog, is_over, has_failed):
    """Else it would be the last line of a script that has failed: the error is printed by then."""
    runner = SessionRunner.__new__(SessionRunner)
    runner._lanes = types.SimpleNamespace(end=lambda worker, end: end)
    runner._failures = types.SimpleNamespace(verdict=lambda *failed: Verdict.TRY_AGAIN)
    runner._channel = types.SimpleNamespace(running={})
    runner._membership = types.SimpleNamespace(name_of=lambda worker: f"worker {worker}")
    sessions = types.SimpleNamespace(
        is_over=is_over,
        has_failed=has_failed,
        post=lambda mailbox, event: None,
        remove_session=lambda mailbox: None,
        is_at_work=lambda mailbox: True,
    )
    source = types.SimpleNamespace(close=lambda: None)
    error = tf.errors.CancelledError(None, None, "cancelled")
    goes_on = not (is_over or has_failed)
    with pytest.raises(TryAgain) if goes_on else contextlib.nullcontext():
        runner._end_failed(0, source, sessions, None, None, error)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["worker 0 failed but answers: its session starts again (cancelled)."] * goes_on


def test_an_abandoned_session_ends_nothing_of_its_successor(caplog):
    """Its call returns when the worker is back, and has a lane and executions again."""
    runner, closed = SessionRunner.__new__(SessionRunner), []
    sessions = types.SimpleNamespace(
        is_at_work=lambda mailbox: False, remove_session=lambda mailbox: None
    )
    source = types.SimpleNamespace(close=lambda: closed.append("source"))
    error = tf.errors.UnavailableError(None, None, "refused")
    runner._end_failed(0, source, sessions, None, None, error)  # it has no lanes to end
    assert closed == ["source"]
    assert not caplog.records
