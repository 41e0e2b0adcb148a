"""Drops the log lines for TensorFlow's developers while TensorFlow connects."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def without_info() -> Iterator[None]:
    """In this context, TensorFlow's logger drops INFO records of this thread and of new ones.

    In a notebook TensorFlow logs INFO records too. Its advice for its strategies, such as
    "CentralStorageStrategy if you are using a single machine", is wrong for those of kerasps.
    Warnings, other loggers and threads that run already are not affected.
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
