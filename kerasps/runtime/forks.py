"""Detects processes that were forked from one that is connected to a cluster.

A fork lacks TensorFlow's threads, so its calls to a task would never return.
"""

from __future__ import annotations

import os

from kerasps.errors import KeraspsError

_STATE = {"forked": False}


def take_note_of_forks() -> None:
    """Mark every process that is forked from this one after this call as a fork."""
    os.register_at_fork(after_in_child=lambda: _STATE.update(forked=True))


def is_fork() -> bool:
    """Return whether this process was forked from a connected one."""
    return _STATE["forked"]


def check_not_forked() -> None:
    """Raise `KeraspsError` in a process that was forked from a connected one."""
    if _STATE["forked"]:
        raise KeraspsError(
            "A process that was forked from one that is connected to a cluster cannot reach the "
            "cluster. Expected: models and variables of the strategy in the process that made it. "
            f"Received: process {os.getpid()}. Start processes with "
            "`multiprocessing.get_context('spawn')`, or fork them before the strategy is made."
        )
