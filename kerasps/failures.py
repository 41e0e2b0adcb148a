"""What an error of TensorFlow's runtime means: a lost ps, ids out of range, or the error of the user's own code."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.errors import InputError, KeraspsError, PSLostError
from kerasps.rows import OUT_OF_RANGE


@contextlib.contextmanager
def translated_errors(strategy: Any) -> Iterator[None]:
    """Errors of TensorFlow's runtime that mean a lost task become ours; wrapped errors of the user's code are unwrapped."""
    try:
        yield
    except KeraspsError:
        raise
    except Exception as exc:
        cause = getattr(exc, "original_exception", exc)
        lost = lost_ps(cause)
        if lost is not None:
            first_line = (str(cause).splitlines() or [""])[0]
            raise PSLostError(
                f"ps {lost} at {strategy.description.jobs['ps'][lost]} is gone, and with it its variables. "
                "Expected: ps tasks that live as long as the training. "
                f"Received: {type(cause).__name__}: {first_line}. Start the ps again and this script with it, from the "
                "last checkpoint: `keras.callbacks.BackupAndRestore` resumes at the epoch that was lost. The ps's log says "
                "why it ended.",
                task_type="ps",
                task_index=lost,
            ) from exc
        out_of_range = re.search(rf"\[{OUT_OF_RANGE}: (.*?)\] \[(-?\d+)\]", str(cause), re.DOTALL)
        if out_of_range is not None:
            text, number = out_of_range[1].replace("\\'", "'"), int(out_of_range[2])
            counted = " (after the number of rows was added to negative ids)" if number < 0 else ""
            raise InputError(
                f"Ids out of range: {text} {number}{counted}. Map the ids into the range, or make the layer that "
                "looks them up larger (`input_dim` of an Embedding)."
            ) from exc
        raised_on = _task_of("worker", cause)
        if raised_on is not None:
            note = f"Raised on worker {raised_on} at {strategy.description.jobs['worker'][raised_on]}."
            if note not in getattr(cause, "__notes__", ()):  # where one of these is inside another
                cause.add_note(note)
        if cause is not exc and isinstance(cause, Exception):
            raise cause from None
        raise


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
