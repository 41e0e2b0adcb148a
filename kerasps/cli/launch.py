"""Runs a script as the coordinator of a local cluster, and ends with it.

See `kerasps launch --help`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

from kerasps.cluster import LocalCluster, TaskProcess, child_environment, end_with_parent
from kerasps.evaluator import EvaluatorProcess

# How often the launcher looks at tasks and script: a person does not notice it, and neither does
# the processor.
_POLL_INTERVAL_S = 0.05
# Ctrl-C in a terminal reaches the script by itself; a SIGINT that was sent to the launcher alone
# does not. They look alike, and a second SIGINT would break off what the script does about the
# first one. So the script is left alone for this long.
_INTERRUPT_GRACE_S = 5.0
# A task that dies closes its connections before its memory is freed, and only then is it gone.
_DEATH_GRACE_S = 0.5
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def launch(
    command: Sequence[str],
    *,
    num_workers: int,
    num_ps: int,
    log_dir: str | None = None,
    start_timeout: float = 60.0,
    evaluator: Sequence[str] | None = None,
    evaluator_timeout: float = 600.0,
) -> int:
    """Start a cluster, run a command as its coordinator, and close the cluster.

    Thread: the main thread, whose signal handlers it replaces for the time being.

    Args:
        command: the command and its arguments.
        num_workers: the number of worker processes.
        num_ps: the number of ps processes.
        log_dir: the directory for log files. None (default) takes a temporary one.
        start_timeout: the time limit in seconds for all processes to be ready. Default 60.
        evaluator: the command that evaluates checkpoints meanwhile, and its arguments. None
            (default) runs none.
        evaluator_timeout: the time in seconds that the evaluator has for the last checkpoint when
            the command has ended. Default 600.

    Returns:
        The exit code of the command, 128 + N where signal N ended it; 1 where it was 0 and the
        evaluator failed.

    Raises:
        TaskStartError: the cluster did not start.
    """
    received: list[signal.Signals] = []
    try:
        with _signal_handlers(_end_with):
            cluster = LocalCluster(
                num_workers, num_ps, log_dir=log_dir, start_timeout=start_timeout
            )
            # From here on a signal is noted and dealt with in `_run`. Set inside the other block,
            # so that none is missed.
            with (
                _signal_handlers(lambda number, frame: received.append(signal.Signals(number))),
                ExitStack() as stack,
            ):
                stack.enter_context(cluster)
                beside = None
                if evaluator is not None:
                    logs = None if log_dir is None else cluster.log_dir
                    beside = stack.enter_context(
                        EvaluatorProcess(evaluator, cluster.description, logs)
                    )
                code = _run(command, cluster, received, beside)
                with warnings.catch_warnings():
                    # Dead tasks have been reported, and with more detail.
                    warnings.simplefilter("ignore", RuntimeWarning)
                    cluster.close()
                # A signal means that all is to end, and soon.
                if beside is not None and not beside.finish(
                    evaluator_timeout, lambda: bool(received)
                ):
                    code = code or 1
    except _EndedBySignal as ended:
        return 128 + ended.number
    if signal.SIGINT in received and code != 0:
        return 128 + signal.SIGINT
    return code


class _EndedBySignal(BaseException):
    """Raised by a signal that comes before there is a script to deal with it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _run(
    command: Sequence[str],
    cluster: LocalCluster,
    received: list[signal.Signals],
    evaluator: EvaluatorProcess | None,
) -> int:
    env = child_environment(os.environ)
    env["TF_CONFIG"] = json.dumps(cluster.tf_config)
    # The coordinator computes little. Without this it would take all memory of every GPU away from
    # the workers.
    env.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    script = subprocess.Popen(command, env=env, preexec_fn=end_with_parent())
    reported = False
    forwarded = 0
    interrupted_at = None
    while script.poll() is None:
        if not reported:
            reported = _report_first_death(cluster)
        if evaluator is not None:
            evaluator.watch()
        for number in received[forwarded:]:
            forwarded += 1
            if number in _FORWARDED:
                script.send_signal(number)
            elif interrupted_at is None:
                interrupted_at = time.monotonic()
        if (
            interrupted_at is not None
            and time.monotonic() - interrupted_at > _INTERRUPT_GRACE_S
            and not _in_foreground()
        ):
            interrupted_at = float("inf")
            script.send_signal(signal.SIGINT)
        time.sleep(_POLL_INTERVAL_S)
    # Where the script failed because a task died, that task may still be on its way out: freeing
    # its memory takes a moment.
    deadline = time.monotonic() + (_DEATH_GRACE_S if script.returncode != 0 else 0.0)
    while (
        not reported
        and not (reported := _report_first_death(cluster))
        and time.monotonic() < deadline
    ):
        time.sleep(_POLL_INTERVAL_S)
    return script.returncode if script.returncode >= 0 else 128 - script.returncode


def _report_first_death(cluster: LocalCluster) -> bool:
    """Print on stderr which task died first, and return whether one did.

    The errors of all others follow from it.
    """
    dead: list[TaskProcess] = [
        process for process in cluster.processes.values() if process.has_ended()
    ]
    if not dead:
        return False
    print(
        f"kerasps launch: a task of the cluster died, this one first:\n{dead[0].report()}",
        file=sys.stderr,
        flush=True,
    )
    return True


def _in_foreground() -> bool:
    """Return whether Ctrl-C in a terminal reaches this process.

    It then reaches the script too, which is in the same process group.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _end_with(number: int, frame: FrameType | None) -> None:
    raise _EndedBySignal(number)


@contextmanager
def _signal_handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {}
    for number in (signal.SIGINT, *_FORWARDED):
        # A signal that is ignored was meant to be, as SIGHUP under nohup.
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
