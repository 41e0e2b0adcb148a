"""Runs a ps or worker task: TensorFlow's server, and nothing else.

`python -m kerasps.cluster.server` and `kerasps serve` start it; TF_CONFIG names the task. By
default a task imports only the part of TensorFlow that the server needs. That takes a sixth of the
time and a third of the memory. Set the environment variable KERASPS_FULL_IMPORT to 1 to import all
of TensorFlow instead. Or set it to a comma-separated list of modules whose custom ops the server
must know (`tensorflow_text`); they are imported after TensorFlow.
KERASPS_CPU_DEVICES is the number of CPU devices of a worker, to try `worker_devices` without GPUs;
they share the cores. Default 1.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kerasps import _compat
from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.serving import leaving, renewal
from kerasps.cluster.serving.bind import listening_on
from kerasps.cluster.serving.first_context import open_first_context
from kerasps.cluster.serving.freed_memory import keep_freed_memory
from kerasps.cluster.serving.held_port import taken_over
from kerasps.cluster.serving.listen_address import listen_address
from kerasps.cluster.serving.ping_limit import without_ping_limit
from kerasps.errors import ClusterConfigError, KeraspsError
from kerasps.runtime.addresses import split_address
from kerasps.runtime.grpc_options import set_grpc_options

REPORT_FD_FLAG = "--report-fd"
WATCH_PARENT_FLAG = "--watch-parent"
CPU_DEVICES = "KERASPS_CPU_DEVICES"

# From <linux/prctl.h>.
_PR_SET_NAME = 15
# How often to check that the parent process is still the same, besides watching the pipe. A task
# may outlive its parent by a second.
_PARENT_POLL_MS = 1000
# A started server listens at once; on a machine that swaps, within seconds.
_LISTEN_TIMEOUT_S = 10.0
# One for a call of the coordinator, one for requests of other tasks meanwhile, and two more.
_MIN_INTER_OP_THREADS = 4
# Set when a signal has told this process to finish its work and end.
_LEAVING = threading.Event()


def serve(
    description: ClusterDescription,
    *,
    bind: str | None = None,
    on_ready: Callable[[int, str | None], None] | None = None,
    watch_parent: bool = False,
    on_coordinator_gone: Callable[[int], int] | None = None,
    until: renewal.End | None = None,
    signal_sets_code: bool = False,
) -> NoReturn:
    """Run the server of one task until SIGTERM or SIGINT, then end this process with exit code 0.

    SIGINT ends it at once. A worker that gets SIGTERM first finishes its steps, and the coordinator
    fetches their results (`leaving`); a second SIGTERM ends it at once.

    Thread: the main thread, whose signal handlers it replaces.

    Args:
        bind: the address of this machine to listen on; `0.0.0.0` and `::` stand for all. None
            (default) takes the host of the task's entry in the description.
        on_ready: called once the server accepts connections, with its port and the address that it
            listens on, None for all.
        watch_parent: whether to exit when stdin ends or the parent process changes. Default False.
        on_coordinator_gone: called with the port when the coordinator that this task served has
            ended, or was killed; returns the exit code, if it returns. With None (default), the
            coordinator's objects stay on the task for ten minutes.
        until: says when to end without a signal, and with which exit code. Default None: never.
        signal_sets_code: whether the exit code is 128 + N if signal N ended it. Default False.
    """
    check_can_serve(description)
    listens_on = listen_address(description, bind)
    keep_freed_memory()
    parent = os.getppid()
    woken = _handle_signals(
        can_leave=description.task_type == "worker" and leaving.can_leave(),
        base_code=128 if signal_sets_code else None,
    )
    _name_process(f"{description.task_type}-{description.task_index}")
    # Never deleted: TensorFlow may crash when it deletes a server that was in use.
    _server, port = start_server(description, listens_on)
    if on_ready is not None:
        on_ready(port, listens_on)
    coordinator = None
    if on_coordinator_gone is not None and renewal.can_watch():
        coordinator = renewal.CoordinatorWatch(port, description.jobs["chief"][0])
    # In this order: when the run ends, its coordinator has ended too.
    watches = [watch for watch in (until, coordinator) if watch is not None]
    over = _wait_for_the_end(woken, parent if watch_parent else None, watches)
    if _LEAVING.is_set():
        leaving.wait_until_free(port)
        _exit(128 + signal.SIGTERM if signal_sets_code else 0)
    if over is not None and over is coordinator and on_coordinator_gone is not None:
        _exit(on_coordinator_gone(port))
    _exit(over.exit_code or 0 if over is not None else 0)


def check_can_serve(description: ClusterDescription) -> None:
    """Raise `ClusterConfigError` if the task runs no server."""
    is_driven = "chief" not in description.jobs and not description.is_sparse
    if description.task_type == "ps" or (description.task_type == "worker" and not is_driven):
        return
    if description.task_type == "worker":
        raise ClusterConfigError(
            "This task runs no server: the cluster has no chief, so each worker drives its own "
            "steps. Expected: task type 'ps', or a chief in TF_CONFIG. Received: task type "
            "'worker', and no chief. Run the training script here, or add the chief."
        )
    fix = (
        "Run the training script here."
        if description.task_type == "chief"
        else "Run the evaluation script here."
    )
    raise ClusterConfigError(
        f"This task runs no server. Expected: task type 'worker' or 'ps' in TF_CONFIG. "
        f"Received: task type {description.task_type!r}. {fix}"
    )


def start_server(description: ClusterDescription, listens_on: str | None) -> tuple[Any, int]:
    """Start the server of this process's task in `description`, on the task's port.

    Returns:
        The server, which serves for as long as it is referenced, and its port.
    """
    set_grpc_options()
    server_lib = _server_lib()
    address = description.server_addresses[description.task]
    _, port = split_address(address)
    spec = server_lib.ClusterSpec(description.as_cluster_spec())
    config = importlib.import_module("tensorflow.core.protobuf.config_pb2").ConfigProto()
    config.inter_op_parallelism_threads = _inter_op_threads()
    config.intra_op_parallelism_threads = _intra_op_threads(description)
    # This applies to the threads that share the work of one operation, which are made with the
    # server. The coordinator sets it for the other threads (see `connection`).
    config.experimental.disable_thread_spinning = description.is_on_one_machine
    if description.task_type == "ps":
        # Variables are in main memory. A ps that saw a GPU would take all of its memory from a
        # worker on the same machine.
        config.device_count["GPU"] = 0
    else:
        config.device_count["CPU"] = _cpu_devices()
    held = taken_over(port)
    try:
        with without_ping_limit() as limit, listening_on(listens_on, port, held=held):
            server = server_lib.Server(
                spec,
                job_name=description.task_type,
                task_index=description.task_index,
                config=config,
                protocol="grpc",
                start=True,
            )
    except KeraspsError:
        raise
    except Exception as exc:
        raise RuntimeError(
            f"TensorFlow's server did not start. Expected: port {port} of this machine to be free. "
            f"Received: {exc}. End the process that holds the port (`ss -ltnp` names it), or give "
            f"{description.task_type} {description.task_index} another address."
        ) from exc
    if not limit.is_lifted:
        # The servers of the other tasks run on the same version of TensorFlow.
        set_grpc_options(servers_limit_pings=True)
    reachable = listens_on or "127.0.0.1"
    _wait_until_listening(reachable, port)
    held.close()
    if description.task_type == "ps":
        open_first_context(server.server_def, reachable, port)
    return server, port


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the task that TF_CONFIG names."""
    parser = argparse.ArgumentParser(
        prog="python -m kerasps.cluster.server",
        description="Runs the server of the task in TF_CONFIG.",
    )
    parser.add_argument(
        REPORT_FD_FLAG,
        type=int,
        help="file descriptor on which to write the port when the server runs",
    )
    parser.add_argument(
        WATCH_PARENT_FLAG,
        action="store_true",
        help="exit when stdin ends or the parent process has ended",
    )
    args = parser.parse_args(argv)

    def report(port: int, listens_on: str | None) -> None:
        if args.report_fd is not None:
            os.write(args.report_fd, f"{port}\n".encode())
            os.close(args.report_fd)

    serve(read_tf_config(), on_ready=report, watch_parent=args.watch_parent)


def _inter_op_threads() -> int:
    """Return the number of threads for functions and requests of other tasks; 0 for TensorFlow's.

    A call from the coordinator occupies one of them until it is done. It may wait for a ps, which
    requests the pushed values from this task: with no other thread, it would wait for ever.
    """
    wanted = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    threads = int(wanted) if wanted.isdecimal() else 0
    threads = threads or len(os.sched_getaffinity(0))
    return 0 if threads >= _MIN_INTER_OP_THREADS else _MIN_INTER_OP_THREADS


def _intra_op_threads(description: ClusterDescription) -> int:
    """Return the number of threads that may share the work of one operation; 0 for TensorFlow's.

    TensorFlow's number is one for each core. If workers share a machine, together they would wake
    more threads than there are cores, so each gets its share of the cores; so do ps.
    """
    num_tasks = len(description.jobs[description.task_type])
    is_alone = num_tasks == 1 or not description.is_on_one_machine
    if is_alone or os.environ.get("TF_NUM_INTRAOP_THREADS"):
        return 0
    return max(1, len(os.sched_getaffinity(0)) // num_tasks)


def _cpu_devices() -> int:
    given = os.environ.get(CPU_DEVICES, "1")
    if not given.isdecimal() or not int(given):
        raise ClusterConfigError(
            f"The environment variable {CPU_DEVICES} is not a number of devices. Expected: 1 or "
            f"more. Received: {given!r}. Unset it for one CPU device per worker."
        )
    return int(given)


def _server_lib() -> Any:
    wanted = os.environ.get("KERASPS_FULL_IMPORT", "")
    if wanted in ("", "0"):
        return _compat.import_server_lib()
    importlib.import_module("tensorflow")
    if wanted != "1":
        for name in wanted.split(","):
            importlib.import_module(name.strip())
    return _compat.import_server_lib()


def _wait_until_listening(address: str, port: int) -> None:
    """Wait until the server listens, since the task is about to report that it is ready."""
    deadline = time.monotonic() + _LISTEN_TIMEOUT_S
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "TensorFlow's server does not accept connections. Expected: an answer on port "
                    f"{port} of {address} within {_LISTEN_TIMEOUT_S:g} s. Received: {exc}. Look at "
                    "the log above."
                ) from exc
            time.sleep(0.02)


def _wait_for_the_end(
    woken: int, parent: int | None, watches: Sequence[renewal.End]
) -> renewal.End | None:
    """Wait until the parent has ended, a signal came or a watch is over; return that watch, if any.

    Signal handlers run meanwhile.
    """
    poller = select.poll()
    # Without it, a signal that comes between two Python instructions would be noticed only when the
    # poll ends, which may be never.
    poller.register(woken, select.POLLIN)
    if parent is None:
        while not _LEAVING.is_set():
            over = next((watch for watch in watches if watch.is_over()), None)
            if over is not None:
                return over
            poller.poll(renewal.POLL_MS if watches else None)
        return None
    # Nobody writes to stdin: it becomes readable when its other end is closed, because the parent
    # has ended. A process that the parent forked may hold that end too, so check the parent's id as
    # well.
    poller.register(0, select.POLLIN | select.POLLHUP)
    while os.getppid() == parent and not _LEAVING.is_set():
        if any(fd == 0 for fd, _ in poller.poll(_PARENT_POLL_MS)) and not os.read(0, 1024):
            break
    return None


def _handle_signals(*, can_leave: bool, base_code: int | None) -> int:
    """Make SIGTERM and SIGINT end this process.

    Args:
        can_leave: whether SIGTERM gives it time to finish its steps.
        base_code: the number to add to that of a signal for the exit code; None for exit code 0.

    Returns:
        A file descriptor that becomes readable when a signal came.
    """

    def exit_on_signal(signum: int, frame: types.FrameType | None) -> None:
        _exit(0 if base_code is None else base_code + signum)

    def leave_on_signal(signum: int, frame: types.FrameType | None) -> None:
        if _LEAVING.is_set():
            exit_on_signal(signum, frame)
        _LEAVING.set()

    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    # TensorFlow cannot stop a server, so there is nothing to clean up: the system frees its memory
    # with the process. A handler in Python runs only while the main thread is not inside
    # TensorFlow, so the server is never joined.
    signal.signal(signal.SIGTERM, leave_on_signal if can_leave else exit_on_signal)
    signal.signal(signal.SIGINT, exit_on_signal)
    return woken


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: TensorFlow's threads still run, and ending the interpreter under them sometimes
    # crashes.
    os._exit(code)


def _name_process(name: str) -> None:
    """Name the process after its task in `ps` and `top`, if the system supports that."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
        except (OSError, AttributeError):
            # Only a convenience: the server must run also with a C library that has no prctl.
            return


if __name__ == "__main__":
    main()
