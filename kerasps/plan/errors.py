"""The errors of `kerasps plan`."""

from __future__ import annotations


class PlanError(BaseException):
    """A script of which `kerasps plan` can make no plan. It is no `Exception`, to end the script.

    A script that handles exceptions would go on, and maybe train.
    """


class FirstStepReached(BaseException):
    """Ends a script at its first step. It is no `Exception`, which a script may handle."""
