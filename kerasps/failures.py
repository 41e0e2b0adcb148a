"""What an error of TensorFlow's runtime means: a lost ps, ids out of range, or the error of the user's own code."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.errors import InputError, KeraspsError, PSLostError

# Part of the message of the error that ids out of range end in, on a worker.
OUT_OF_RANGE = "kerasps: ids out of range"


# Attributes of an error: the worker that it comes from, and that the user is told so.
_WORKER, _TOLD = "_kerasps_worker", "_kerasps_told"


class _Cluster:
    """The cluster that this process is connected to: there is one in its life."""

    strategy: Any = None


def connected_to(strategy: Any) -> None:
    """Takes note of the strategy whose ps hold the variables. Call once it is connected."""
    _Cluster.strategy = strategy


def comes_from(error: BaseException, worker: int) -> None:
    """Takes note that an error of TensorFlow's runtime was raised on a worker; its own words may name any task."""
    if isinstance(error, tf.errors.OpError):
        setattr(error, _WORKER, worker)


@contextlib.contextmanager
def translated_errors(strategy: Any) -> Iterator[None]:
    """Errors of TensorFlow's runtime become what they mean to the user: a lost ps, ids out of range, or their own error."""
    try:
        yield
    except KeraspsError:
        raise
    except Exception as exc:
        cause = getattr(exc, "original_exception", exc)
        _raise_if_ps_lost(strategy, cause)
        out_of_range = re.search(rf"\[{OUT_OF_RANGE}: (.*?)\] \[(-?\d+)\]", str(cause), re.DOTALL)
        if out_of_range is not None:
            text, number = out_of_range[1].replace("\\'", "'"), int(out_of_range[2])
            raise InputError(
                f"Ids out of range: {text} {number}. Map the ids into the range, or make the layer that "
                "looks them up larger (`input_dim` of an Embedding)."
            ) from None
        worker = getattr(cause, _WORKER, None)
        if worker is not None and not hasattr(cause, _TOLD):
            told = cleaned(cause)
            setattr(told, _TOLD, True)
            told.add_note(f"Raised on worker {worker} at {strategy.description.jobs['worker'][worker]}.")
            raise told from None
        if cause is not exc and isinstance(cause, Exception):
            raise cause from None
        raise


class _NamingLostPS:
    """Makes an error of TensorFlow's runtime that a lost ps ends in a `PSLostError`; leaves others alone."""

    def __enter__(self) -> None:
        """Does nothing: what fails is dealt with."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is not None and _Cluster.strategy is not None:
            _raise_if_ps_lost(_Cluster.strategy, error)


# For variables, wherever they are read or written.
naming_lost_ps = _NamingLostPS()


def check_ps_of(strategy: Any) -> None:
    """Raises `PSLostError` where a ps does not answer: for errors that come after one which somebody has swallowed."""
    for ps in range(strategy.num_ps):
        error = error_of(f"/job:ps/replica:0/task:{ps}")
        if error is not None:
            _raise_if_ps_lost(strategy, error)


def _raise_if_ps_lost(strategy: Any, error: BaseException) -> None:
    lost = lost_ps(error)
    if lost is None:
        return
    cause = cleaned(error)
    first_line = (str(cause).splitlines() or [""])[0]
    raise PSLostError(
        f"ps {lost} at {strategy.description.jobs['ps'][lost]} is gone, and with it its variables. "
        "Expected: ps tasks that live as long as the training. "
        f"Received: {type(cause).__name__}: {first_line}. Start the ps again and this script with it, from the "
        "last checkpoint: `keras.callbacks.BackupAndRestore` resumes at the epoch that was lost. The ps's log says "
        "why it ended.",
        task_type="ps",
        task_index=lost,
    ) from cause


# What TensorFlow's runtime adds to an operation's own message: by way of which functions, operations and calls it came.
_WAY = re.compile(
    r"^(\s*\[\[|Additional GRPC error information|:[A-Z_]+:Error received from peer|\s*Encountered when executing an operation)"
)
_FUNCTION = re.compile(r"\{\{function_node [^}]*\}\} ?")
_NODE = re.compile(r"\{\{node ([^}]*)\}\}")
# How some errors of functions begin: with where each operation was made, which is not known here.
_MADE_AT = re.compile(r"^Graph execution error:\n\n(Detected at node .*\n(?:<stack traces unavailable>\n|(?:(?:  .*)?\n)+))*")
_FIRST_OF_SEVERAL = re.compile(r"^\d+ root error\(s\) found\.\n\s*\(0\) [A-Z_]+: +")
_NEXT_OF_SEVERAL = re.compile(r"^\s*\(\d+\) [A-Z_]+: |^\d+ successful operations\.")


def cleaned(error: Any) -> Any:
    """An error of TensorFlow's runtime with the operation's own message, and the name of the operation.

    What else TensorFlow says of its way here, twenty lines mostly, is in the `__context__` of the result.
    """
    if not isinstance(error, tf.errors.OpError):
        return error
    message = _MADE_AT.sub("", _FUNCTION.sub("", error.message))
    kept: list[str] = []
    for line in _FIRST_OF_SEVERAL.sub("", message).splitlines():
        if _WAY.match(line) or _NEXT_OF_SEVERAL.match(line):
            break
        kept.append(line)
    node = _NODE.search(error.message)
    if node is not None and node[1] not in "\n".join(kept):
        kept.append(f"In operation '{node[1]}'.")
    try:
        told = type(error)(error.node_def, error.op, "\n".join(kept))
    except TypeError:  # a class of its own
        return error
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    told.__context__, told.__suppress_context__ = error, True
    for attribute in (_WORKER, _TOLD):
        if hasattr(error, attribute):
            setattr(told, attribute, getattr(error, attribute))
    return told


class SessionFailures:
    """Tells a session that failed because its worker is lost from one that fails for what it does.

    TensorFlow's coordinator goes by the words of an error: what is called unavailable and names a worker is a lost worker, and
    the session is started again when the worker is back, for ever. Here the worker is asked. One that answers, and knows us, is
    not lost; where it meets the same error several times in a row, that is the error of what it does.
    """

    _MAX_TRIES = 3

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._met: dict[int, tuple[str, int]] = {}

    def may_be_loss(self, error: BaseException) -> bool:
        """Whether `error` may say that a task is lost, and not what is wrong with a step."""
        kinds = (
            tf.errors.UnavailableError,
            tf.errors.AbortedError,
            tf.errors.CancelledError,
            tf.errors.DeadlineExceededError,
            tf.errors.InternalError,
            tf.errors.UnknownError,
        )
        if getattr(error, "original_exception", None) is not None or isinstance(error, kinds) or _is_between(error):
            return True
        return bool(_compat.is_worker_failure(error)) or lost_ps(error) is not None

    def retry(self, error: BaseException, worker: int) -> BaseException | None:
        """What to hand to TensorFlow's coordinator, so that it starts the session again; None where that would not help.

        Thread: that of the worker's session.
        """
        ps = lost_ps(error)
        if ps is not None:
            return error if answers(f"/job:ps/replica:0/task:{ps}") else None
        device = f"/job:worker/replica:0/task:{worker}"
        is_known = bool(_compat.is_worker_failure(error))
        if not answers(device):
            self.forget(worker)
            # Some ways to be lost are none that TensorFlow knows.
            return error if is_known else tf.errors.AbortedError(None, None, f"{device} is lost: {error}")
        if not is_known and not isinstance(error, tf.errors.CancelledError) and not _is_between(error):
            return None
        what = type(error).__name__ + re.sub(r"[0-9]+", "", (str(error).splitlines() or [""])[0])
        with self._lock:
            before, times = self._met.get(worker, ("", 0))
            times = times + 1 if what == before else 1
            self._met[worker] = (what, times)
        if times >= self._MAX_TRIES:
            return None
        # TensorFlow retries what it knows, and what was cancelled and names a task; that may not say where it was.
        is_named = isinstance(error, tf.errors.CancelledError) and "/job:" in str(error)
        return error if is_known or is_named else tf.errors.CancelledError(None, None, f"{device}: {error}")

    def forget(self, worker: int) -> None:
        """Takes note that the worker has done something, or is another."""
        if worker in self._met:
            with self._lock:
                self._met.pop(worker, None)


def _is_between(error: BaseException) -> bool:
    """Whether a call met TensorFlow while it took a worker back: for a moment it has forgotten where workers are."""
    return isinstance(error, tf.errors.InvalidArgumentError) and "Primary device is not remote" in error.message


def answers(device: str) -> bool:
    """Whether the task of `device` is there, and knows this process: one that was started anew does not."""
    return error_of(device) is None


def error_of(device: str) -> tf.errors.OpError | None:
    """What speaking to the task of `device` ends in; None where all is well."""
    try:
        with tf.device(device):
            tf.identity(tf.constant(0)).numpy()
    except tf.errors.OpError as exc:
        return exc
    return None


def lost_ps(error: BaseException) -> int | None:
    """The index of the ps that `error` says is gone, else None."""
    if not isinstance(error, tf.errors.OpError):
        return None
    text = str(error)
    gone = isinstance(error, (_compat.PSUnavailableError, tf.errors.UnavailableError, tf.errors.AbortedError))
    if not (_compat.is_ps_failure(error) or (gone and "/job:ps" in text)):
        return None
    return _task_of("ps", error)


def _task_of(job: str, error: BaseException) -> int | None:
    """The index of the first task of a job that an error of TensorFlow's runtime names, else None."""
    found = re.search(rf"/job:{job}/replica:0/task:(\d+)", str(error)) if isinstance(error, tf.errors.OpError) else None
    return int(found.group(1)) if found else None
