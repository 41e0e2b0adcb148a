"""The errors of `kerasps plan`."""

from __future__ import annotations


class PlanError(BaseException):
    """`kerasps plan` cannot plan the script. It is not an `Exception`, so that the script ends.

    A script that handles exceptions would otherwise continue, and might train.
    """


class FirstStepReached(BaseException):
    """Ends a script at its first step. It is not an `Exception`, which a script may handle."""
