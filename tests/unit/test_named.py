"""Variables, while an error is left behind that belongs to a lost worker."""

from __future__ import annotations

import contextlib

import pytest
import tensorflow as tf

from kerasps import _compat
from kerasps.runtime import calls
from kerasps.variables import NamedVariable
from kerasps.variables.storage.names import CALLS

FROM_WORKER = (
    "Additional GRPC error information from remote target /job:worker/replica:0/task:0 while "
    "calling /tensorflow.eager.EagerService/Enqueue:"
)


def make(value=1.0):
    return NamedVariable(
        lambda: tf.constant(value), shape=[], dtype=tf.float32, trainable=False, name="v"
    )


@contextlib.contextmanager
def sent_ahead():
    """In this context, operations return before they are done; it gives their executor."""
    context = _compat.eager_context()
    before, executor = context.executor, _compat.new_executor(True)
    context.executor = executor
    try:
        yield executor
    finally:
        executor.clear_error()
        context.executor = before


@contextlib.contextmanager
def left_behind(message):
    """In this context, the next operation ends in an error that is not its own.

    What is deleted of a lost task leaves one in this way: an executor that has failed refuses what
    comes after.
    """
    with sent_ahead() as executor:
        tf.raw_ops.Assert(condition=False, data=[message])
        with contextlib.suppress(tf.errors.OpError):
            executor.wait()
        yield


def test_a_variable_is_made_though_a_worker_was_lost():
    with left_behind(FROM_WORKER):
        variable = make(3.0)
    assert variable.numpy() == 3.0


@pytest.mark.parametrize("method", ["assign_add", "assign", "read_value", "numpy"])
def test_a_variable_is_used_once_though_a_worker_was_lost(method):
    variable = make(1.0)
    arguments = [2.0] if method.startswith("assign") else []
    with left_behind(FROM_WORKER):
        getattr(variable, method)(*arguments)
    assert variable.numpy() == {"assign_add": 3.0, "assign": 2.0}.get(method, 1.0)


@pytest.mark.parametrize("convert", [bool, complex, float, int])
def test_a_variable_is_a_number_though_a_worker_is_lost_between_read_and_fetch(
    convert, monkeypatch
):
    variable, read, reads = make(2.0), NamedVariable._read_variable_op, []

    def read_that_fails_first(self, *args, **kwargs):
        reads.append(self)
        if len(reads) == 1:
            return tf.debugging.check_numerics(float("nan"), FROM_WORKER)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(NamedVariable, "_read_variable_op", read_that_fails_first)
    with sent_ahead() as executor:
        assert convert(variable) == convert(2.0)
        calls.drain(executor)  # else it may print the failure when it is deleted
    assert len(reads) == 2


def test_an_error_of_another_kind_is_raised():
    variable = make()
    with left_behind("of anyone"), pytest.raises(tf.errors.InvalidArgumentError, match="of anyone"):
        variable.assign_add(1.0)
    assert variable.numpy() == 1.0


def test_a_session_hears_that_its_worker_is_lost(monkeypatch):
    variable = make()
    monkeypatch.setattr(CALLS, "are_waited_for", False)
    with left_behind(FROM_WORKER), pytest.raises(tf.errors.InvalidArgumentError, match="worker"):
        variable.assign_add(1.0)
    assert variable.numpy() == 1.0
