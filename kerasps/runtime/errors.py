"""Translates errors of TensorFlow's runtime: a lost ps, ids out of range, or a user's error."""

from __future__ import annotations

import contextlib
import re
import time
import types
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasps.errors import InputError, KeraspsError, PSLostError
from kerasps.runtime.connected import ClusterHost, check_not_closed, closed_error, connected_host
from kerasps.runtime.grpc_options import hang_limit
from kerasps.runtime.probe import Answer, ask_servers
from kerasps.runtime.python_errors import kept_exception
from kerasps.runtime.supervision import tell_supervisor

# The beginning of a worker's error message about ids out of range.
_OUT_OF_RANGE = "kerasps: ids out of range"
# For each table of a step, by its name on its ps, the text of an error about its ids.
_TEXTS: dict[str, str] = {}

# A running server answers in a millisecond; one that swaps, in less than this.
_ASK_S = 1.0
# The text with which gRPC names the task that an error came from.
_FROM_TASK = "GRPC error information from remote target /job:"
_FROM_PS = f"{_FROM_TASK}ps"

# The pause between two probes of a ps; the time limit of an answer; how long a call to a ps may
# fail once it answers probes, because gRPC reconnects after two seconds.
_PAUSE_S, _ANSWER_S, _RECONNECT_S = 0.1, 1.0, 5.0

# TensorFlow's texts for a task, or a device of one, that is unknown to this process.
_OF_TASK = re.compile(r"/job:(worker|ps)\b|unknown device|contains an invalid device")

# Attributes of an error: the worker that it comes from; True if its message names that worker.
_WORKER, _HAS_NOTE = "_kerasps_worker", "_kerasps_has_note"


def comes_from(error: BaseException, worker: int) -> None:
    """Mark an error of TensorFlow's runtime as raised on a worker.

    Its message may name any task.
    """
    if isinstance(error, tf.errors.OpError):
        setattr(error, _WORKER, worker)


@contextlib.contextmanager
def translated_errors(host: ClusterHost | None) -> Iterator[None]:
    """In this context, translate errors of TensorFlow's runtime into errors for the user.

    Raises:
        ClusterClosedError: the cluster was closed.
        PSLostError: a ps is lost.
        InputError: ids are out of range, or strings are used as numbers.
        Exception: otherwise, the error of the user's code: the exception itself if the code ran in
            this process, else an error of TensorFlow with its message.
    """
    try:
        yield
    except KeraspsError:
        raise
    except Exception as exc:
        # TensorFlow's coordinator wraps the error of a session in another error.
        cause = getattr(exc, "original_exception", exc)
        _raise_if_closed(cause)
        if host is not None:
            _raise_if_ps_lost(host, cause)
        users = kept_exception(cause)
        if users is not None:
            raise users from users.__cause__ or cleaned(cause)
        out_of_range = re.search(rf"\[{_OUT_OF_RANGE} of ([^]]+)\] \[(-?\d+)\]", str(cause))
        if out_of_range is not None:
            text, number = _TEXTS[out_of_range[1]], int(out_of_range[2])
            advice = _NO_NUMBER if number in _OF_NAN else _TOO_SMALL
            raise InputError(f"Ids out of range: {text} {number}. {advice}") from None
        _raise_if_strings(cause)
        worker = getattr(cause, _WORKER, None)
        if host is not None and worker is not None and not hasattr(cause, _HAS_NOTE):
            told = cleaned(cause)
            setattr(told, _HAS_NOTE, True)
            told.add_note(
                f"Raised on worker {worker} at {host.description.jobs['worker'][worker]}."
            )
            raise told from None
        if cause is not exc and isinstance(cause, Exception):
            raise cause from None
        raise


def out_of_range(table: str, text: str) -> str:
    """Return a worker's message about ids of a table; `translated_errors` replaces it by `text`.

    A step graph that was built for another model names this table too, by its name on its ps.
    """
    _TEXTS[table] = text
    return f"{_OUT_OF_RANGE} of {table}"


_TOO_SMALL = (
    "Map the ids into the range, or make the layer that looks them up larger (`input_dim` of an "
    "Embedding)."
)
# The integers into which a processor converts NaN, infinity and numbers that are too large.
_OF_NAN = (-(2**31), -(2**63))
_NO_NUMBER = (
    "NaN, infinity and numbers that are too large become this integer: look for missing values in "
    "the data, and pass ids as integers."
)
_CAST_OF_STRINGS = re.compile(r"Cast string to \w+ is not supported")


def _raise_if_strings(error: BaseException) -> None:
    """Raise `InputError` if a model has cast strings to numbers."""
    if not isinstance(error, tf.errors.UnimplementedError):
        return
    found = _CAST_OF_STRINGS.search(error.message)
    if found is not None:
        node = _NODE.search(error.message)
        where = f", in operation {node[1]!r}" if node is not None else ""
        raise InputError(
            "The model got strings where it computes with numbers. Expected: numbers, or a layer "
            "that converts strings to numbers first, such as `keras.layers.StringLookup` or "
            f"`TextVectorization`. Received: strings in x or y ({found[0]}{where}). Map them to "
            "numbers in the data, or begin the model with such a layer."
        ) from cleaned(error)


class _NamingClosed:
    """A context that raises `ClusterClosedError` for errors about a task of a closed cluster.

    A class with one instance, because functions enter it at each call: a generator costs more.
    """

    def __enter__(self) -> None:
        """Do nothing: only a failure needs attention."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if error is not None:
            self._name(error)

    def _name(self, error: BaseException) -> None:
        if _names_task(error):
            _raise_if_closed(error, "a use of a variable")


# For code that may use the cluster or be local to this process: functions, and bare variables.
naming_closed = _NamingClosed()


class _NamingLostPS(_NamingClosed):
    """A context that raises `PSLostError` for errors of calls to a lost ps, and no other error.

    If the cluster was closed, it raises `ClusterClosedError`.
    """

    def _name(self, error: BaseException) -> None:
        host = connected_host()
        if host is not None:
            _raise_if_closed(error, "a use of a variable")
            _raise_if_ps_lost(host, error)


# For all reads and writes of variables.
naming_lost_ps = _NamingLostPS()


def check_ps_of(host: ClusterHost | None) -> None:
    """Raise `PSLostError` if a ps does not answer, `ClusterClosedError` if the cluster is closed.

    Call after an error that does not name its cause, because other code dropped the cause.
    """
    check_not_closed()
    if host is None:
        return
    for ps in range(host.num_ps):
        error = error_of(f"/job:ps/replica:0/task:{ps}")
        if error is not None:
            _raise_if_ps_lost(host, error)


def absent_ps_error(host: ClusterHost, ps: int) -> KeraspsError:
    """Return the error for a ps that the membership has recorded as lost or hung."""
    closed = closed_error()
    if closed is not None:
        return closed
    if not host.hangs(ps):
        return _lost_ps_error(host, ps, "connection refused")
    return _hung_ps_error(host, ps, "no answer")


def _raise_if_ps_lost(host: ClusterHost, error: BaseException) -> None:
    lost = lost_ps(error)
    if lost is None or ps_is_there(host, lost):
        return  # the ps is alive: the call failed for another reason, or only mentions the ps
    cause = cleaned(error)
    if host.hangs(lost):
        raise absent_ps_error(host, lost) from cause
    first_line = (str(cause).splitlines() or [""])[0]
    make = _hung_ps_error if _is_silent(host, lost) else _lost_ps_error
    raise make(host, lost, f"{type(cause).__name__}: {first_line}") from cause


def _is_silent(host: ClusterHost, ps: int) -> bool:
    """Return whether a ps to which a call failed does not answer, so that it may still be alive."""
    address = host.description.jobs["ps"][ps]
    return ask_servers({ps: address}, _ASK_S)[ps] is Answer.IS_SILENT


def _hung_ps_error(host: ClusterHost, ps: int, received: str) -> PSLostError:
    tell_supervisor("hung", "ps", ps)
    return PSLostError(
        f"ps {ps} at {host.description.jobs['ps'][ps]} does not answer, and counts as lost, "
        f"with its variables. Expected: ps tasks that answer within {hang_limit():g} seconds "
        f"(KERASPS_HANG_TIMEOUT). Received: silence ({received}): its process is stopped, or the "
        f"network drops packets. {host.after_ps_loss}",
        task_type="ps",
        task_index=ps,
    )


def ps_is_there(host: ClusterHost, ps: int) -> bool:
    """Return whether a ps is alive and knows this process; probe it until the answer is certain.

    A silent ps may only be delayed: it is probed until it counts as lost, for KERASPS_HANG_TIMEOUT
    seconds (10). For a ps that refuses connections, or was restarted, return False at once.
    Thread: any.
    """
    device = f"/job:ps/replica:0/task:{ps}"
    address = host.description.jobs["ps"][ps]
    silent_since = serves_since = None
    while True:
        error = error_of(device)
        if error is None:
            return True
        if not isinstance(error, (tf.errors.UnavailableError, tf.errors.DeadlineExceededError)):
            return False
        answer, now = ask_servers({ps: address}, _ANSWER_S)[ps], time.monotonic()
        if answer is Answer.REFUSES:
            return False
        if answer is Answer.SERVES:
            silent_since, serves_since = None, serves_since or now
            if now - serves_since > _RECONNECT_S:
                return False
        else:
            serves_since, silent_since = None, silent_since or now
            if host.hangs(ps) or now - silent_since > hang_limit() + _RECONNECT_S:
                return False
        time.sleep(_PAUSE_S)


def _raise_if_closed(error: BaseException, received: str = "a use of the cluster") -> None:
    kinds = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
    closed = closed_error(received) if isinstance(error, kinds) or _names_task(error) else None
    if closed is not None:
        raise closed from cleaned(error)


def _names_task(error: BaseException) -> bool:
    """Return whether an error of TensorFlow's runtime is about a device of another task."""
    return isinstance(error, tf.errors.OpError) and _OF_TASK.search(str(error)) is not None


def _lost_ps_error(host: ClusterHost, ps: int, received: str) -> PSLostError:
    tell_supervisor("lost", "ps", ps)
    return PSLostError(
        f"ps {ps} at {host.description.jobs['ps'][ps]} is gone, and with it its variables. "
        f"Expected: ps tasks that live as long as the training. Received: {received}. "
        f"{host.after_ps_loss} The ps's log says why it ended.",
        task_type="ps",
        task_index=ps,
    )


# The lines that TensorFlow's runtime adds to an operation's message: the functions, operations and
# calls through which the error came.
_WAY = re.compile(
    r"^(\s*\[\[|Additional GRPC error information|:[A-Z_]+:Error received from peer"
    r"|\s*Encountered when executing an operation)"
)
_FUNCTION = re.compile(r"\{\{function_node [^}]*\}\} ?")
_NODE = re.compile(r"\{\{node ([^}]*)\}\}")
# The beginning of some errors of functions: the stack trace of each operation, unavailable here.
_MADE_AT = re.compile(
    r"^Graph execution error:\n\n"
    r"(Detected at node .*\n(?:<stack traces unavailable>\n|(?:(?:  .*)?\n)+))*"
)
_FIRST_OF_SEVERAL = re.compile(r"^\d+ root error\(s\) found\.\n\s*\(0\) [A-Z_]+: +")
_NEXT_OF_SEVERAL = re.compile(r"^\s*\(\d+\) [A-Z_]+: |^\d+ successful operations\.")


def cleaned(error: object) -> Any:
    """Return an error of TensorFlow's runtime with only the operation's message and name.

    The lines that TensorFlow adds, usually twenty, stay in the `__context__` of the result. Return
    any other error unchanged.
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
    except TypeError:  # a subclass with another constructor
        return error
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    told.__context__, told.__suppress_context__ = error, True
    for attribute in (_WORKER, _HAS_NOTE):
        if hasattr(error, attribute):
            setattr(told, attribute, getattr(error, attribute))
    return told


def answers(device: str) -> bool:
    """Return whether the task of `device` is alive and knows this process.

    A restarted task does not know this process.
    """
    return error_of(device) is None


def is_dead(device: str) -> bool:
    """Return whether the task of `device`, which refuses connections, does not answer calls.

    A call may raise the error of an earlier one, which came late. So it takes two that fail.
    """
    return not answers(device) and not answers(device)


def error_of(device: str) -> tf.errors.OpError | None:
    """Call the task of `device` and return the error of the call, None if it succeeds."""
    try:
        with tf.init_scope(), tf.device(device):
            tf.identity(tf.constant(0)).numpy()
    except tf.errors.OpError as exc:
        return exc
    return None


def lost_ps(error: BaseException) -> int | None:
    """Return the index of the ps that is lost according to `error`, else None."""
    if not isinstance(error, tf.errors.OpError):
        return None
    if isinstance(error, (tf.errors.UnavailableError, tf.errors.AbortedError)):
        return _task_of("ps", error)
    # A ps that was lost and restarted between two calls does not know its earlier variables.
    text = str(error)
    came_back = isinstance(error, tf.errors.InvalidArgumentError) and (
        "unknown device" in text.lower()
        or "Unable to find the relevant tensor remote_handle" in text
    )
    return _task_of("ps", error) if came_back and _FROM_PS in text else None


def comes_from_worker(error: BaseException) -> bool:
    """Return whether `error` is that of a call to a worker, according to its message."""
    return isinstance(error, tf.errors.OpError) and f"{_FROM_TASK}worker" in str(error)


def _task_of(job: str, error: BaseException) -> int | None:
    """Return the index of the first task of a job that an error names, else None."""
    found = (
        re.search(rf"/job:{job}/replica:0/task:(\d+)", str(error))
        if isinstance(error, tf.errors.OpError)
        else None
    )
    return int(found.group(1)) if found else None
