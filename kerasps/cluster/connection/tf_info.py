"""Keeps what TensorFlow logs for its own developers while it connects away from users."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def without_info() -> Iterator[None]:
    """In this context, TensorFlow's logger drops INFO records of this thread and of new ones.

    In a notebook TensorFlow logs from INFO on, and what it says of a strategy of its own, such as
    "CentralStorageStrategy if you are using a single machine", is not true of ours. Warnings, other
    loggers and threads that run already are left as they are.
    """
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}

    def is_kept(record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or record.thread in others

    logger = tf.get_logger()
    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)
