"""The errors of `kerasps plan`."""

from __future__ import annotations

from kerasps.errors import KeraspsError


class PlanError(KeraspsError):
    """A script of which `kerasps plan` can make no plan."""
