"""Keeps the exceptions of Python code that TensorFlow calls, such as that of a generator.

TensorFlow turns such an exception into an error of its own, which has the text of the exception and
of its traceback. `translated_errors` raises the exception instead.
"""

from __future__ import annotations

from collections import deque

import tensorflow as tf

# An exception refers to what its code was working on, so only a few are kept. There are several if
# a dataset calls Python concurrently.
_kept: deque[Exception] = deque(maxlen=16)


def keep_exception(exception: Exception) -> None:
    """Keep an exception that TensorFlow is about to turn into an error. Thread: any."""
    _kept.append(exception)


def kept_exception(error: BaseException) -> Exception | None:
    """Return the exception that TensorFlow turned into `error`; None if there is none."""
    if not isinstance(error, tf.errors.OpError):
        return None
    for exception in reversed(list(_kept)):
        if f"{type(exception).__name__}: {exception}" in error.message:
            _kept.clear()
            return exception
    return None
