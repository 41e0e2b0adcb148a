"""Drops from stderr the lines that TensorFlow prints about tasks that end on purpose.

TensorFlow's C++ code writes to the file descriptor, not to `sys.stderr` or Python's loggers. When
the process disconnects from the tasks, it prints some lines of errors for each call in flight to a
task, and for each task that died before.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

# Lines of the source files that deal with other tasks, and the lines that follow these.
_OF_TASKS = re.compile(
    rb"^[IWE]\d{4} .*\b(context|remote_\w+|destroy_tensor_handle_node|eager_executor"
    rb"|rpc_rendezvous_mgr|grpc_\w+|cluster_function_library_runtime|kernel_and_device)\.(cc|h):\d+\]"
    rb"|^Additional GRPC error information from remote target|^:[A-Z_]+:Error received from peer"
    rb"|^This could happen if the remote target has been disconnected"
    rb"|^\s+Encountered when executing an operation using EagerExecutor"
)
_JOIN_S = 1.0


@contextlib.contextmanager
def without_lines_about_tasks() -> Iterator[None]:
    """In this context, drop the lines that TensorFlow prints about other tasks.

    All other lines are passed on, each when it is complete. If Python starts no thread any more, as
    at the end of a process from 3.12 on, nothing is dropped.
    """
    with contextlib.ExitStack() as stack:
        # A process may have no stderr.
        with contextlib.suppress(OSError, RuntimeError):
            stack.enter_context(_filtered())
        yield


@contextlib.contextmanager
def _filtered() -> Iterator[None]:
    saved = os.dup(2)
    read_fd, write_fd = os.pipe()
    thread = threading.Thread(target=_pass_on, args=[read_fd, saved], daemon=True)
    try:
        thread.start()
    except BaseException:
        for fd in (saved, read_fd, write_fd):
            os.close(fd)
        raise
    _flush()
    os.dup2(write_fd, 2)
    os.close(write_fd)
    try:
        yield
    finally:
        _flush()
        os.dup2(saved, 2)
        # A process that was started meanwhile may hold the pipe; then the thread keeps running.
        thread.join(_JOIN_S)


def _flush() -> None:
    with contextlib.suppress(Exception):  # it may be closed, or an object of the user's
        sys.stderr.flush()


def _pass_on(read_fd: int, write_fd: int) -> None:
    with open(read_fd, "rb") as source, open(write_fd, "wb", buffering=0) as target:
        for line in source:
            if not _OF_TASKS.search(line):
                with contextlib.suppress(OSError):
                    target.write(line)
