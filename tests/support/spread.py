"""Small models on all ps, in tests of what several ps must do together."""

from __future__ import annotations

import pytest

from kerasps.step.records import specs
from kerasps.variables.placing import placement


def spread() -> None:
    """From now on, treat each variable as a large one, however small.

    It goes to the ps with the fewest bytes, and travels by itself.
    """
    placement.SMALL_BYTES = -1
    specs.LARGE_BYTES = 32


def keep_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each new variable go to the ps with the fewest bytes, until the end of a test."""
    monkeypatch.setattr(placement, "SMALL_BYTES", -1)
