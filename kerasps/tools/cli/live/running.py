"""Finds the runs of this user on this machine, for the commands that show or trace one."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from kerasps.errors import KeraspsError
from kerasps.tools.monitoring.sockets import RunningProcess, ask_running


class RunNotFoundError(KeraspsError):
    """A command found no run, or more than one."""


def chosen_run(
    command: str, pid: int | None, *, advice: str = "", one_of_cluster: bool = False
) -> RunningProcess:
    """Return the run of a process, or the only one.

    Args:
        command: the command that asks, such as `"kerasps top"`.
        advice: more advice for the error if there is no run. Default: nothing.
        one_of_cluster: whether the processes that drive one cluster's workers count as one run.
    """
    running = ask_running(pid)
    if running and (pid is not None or len(running) == 1):
        return running[0]
    if pid is not None:
        raise RunNotFoundError(
            f"Process {pid} does not answer. Expected: the id of a process of this user, on this "
            f"machine, that has made a strategy and runs. Received: {pid}, {_state_of(pid)}. "
            f"{_listed(command, ask_running())}"
        )
    if not running:
        raise RunNotFoundError(
            "No run was found. Expected: a process of this user, on this machine, that has made a "
            "`kerasps.ParameterServerStrategy` or a `kerasps.WorkerDrivenStrategy`. Received: none "
            f"that answers. Start the training first{advice}."
        )
    jobs = [process.reply.get("jobs") for process in running]
    if one_of_cluster and jobs[0] and all(tasks == jobs[0] for tasks in jobs):
        return running[0]
    raise RunNotFoundError(
        f"There are {len(running)} runs. Expected: the process id of one of them. Received: none. "
        f"{_listed(command, running)}"
    )


def _listed(command: str, running: Sequence[RunningProcess]) -> str:
    """Return a sentence that lists the processes to choose from, a line each."""
    if not running:
        return "No other run answers."
    lines = "".join(f"\n  {command} {process.pid}    {_line(process)}" for process in running)
    return f"Give one of these:{lines}"


def _line(process: RunningProcess) -> str:
    reply = process.reply
    if "error" in reply:
        return str(reply["error"])
    status = reply["status"]
    return f"{reply['script']}: {status['state']}, {status['steps']:,} steps, {reply['strategy']}"


def _state_of(pid: int) -> str:
    return "which runs" if psutil.pid_exists(pid) else "which does not run"
