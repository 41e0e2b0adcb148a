"""Processes forked from one that is connected to a cluster: they lack TensorFlow's threads, so a call would never end."""

from __future__ import annotations

import os

from kerasps.errors import KeraspsError

_STATE = {"forked": False}


def take_note_of_forks() -> None:
    """From here on a process that is forked from this one knows it."""
    os.register_at_fork(after_in_child=lambda: _STATE.update(forked=True))


def is_fork() -> bool:
    """Whether this process was forked from a connected one."""
    return _STATE["forked"]


def check_not_forked() -> None:
    """Raises KeraspsError in a process that was forked from a connected one."""
    if _STATE["forked"]:
        raise KeraspsError(
            "A process that was forked from one that is connected to a cluster cannot reach the cluster. Expected: models and "
            f"variables of the strategy in the process that made it. Received: process {os.getpid()}. Start processes with "
            "`multiprocessing.get_context('spawn')`, or fork them before the strategy is made."
        )
