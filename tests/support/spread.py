"""Small models on all ps, in tests of what several ps must do together."""

from __future__ import annotations

import pytest

from kerasps.variables import placement


def spread() -> None:
    """From now on, have each new variable go to the ps with the fewest bytes, however small."""
    placement.SMALL_BYTES = -1


def keep_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do as `spread` until the end of a test."""
    monkeypatch.setattr(placement, "SMALL_BYTES", -1)
