"""What a session that failed hands to TensorFlow's coordinator."""

from __future__ import annotations

import pytest
import tensorflow as tf

from kerasps.cluster import tf_errors as failures
from kerasps.training import session_failures


@pytest.mark.parametrize(
    "where", ["RemoteExecuteNode::RunAsync", "RecvFromRemoteAsync is cancelled"]
)
def test_what_was_cancelled_without_saying_where_is_tried_again(monkeypatch, where):
    # TensorFlow's coordinator starts a session again whose CancelledError has a task in its text,
    # and gives up at any other.
    monkeypatch.setattr(session_failures, "answers", lambda device: True)
    sessions, error = (
        session_failures.SessionFailures(),
        tf.errors.CancelledError(None, None, where),
    )
    assert sessions.may_be_loss(error)
    handed = [sessions.retry(error, worker=1) for _ in range(3)]
    assert [type(e) for e in handed] == [
        tf.errors.CancelledError,
        tf.errors.CancelledError,
        type(None),
    ]
    assert all("/job:worker/replica:0/task:1" in str(e) and where in str(e) for e in handed[:2])


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
