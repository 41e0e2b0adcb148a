"""Small models on all ps, in tests of what several ps must do together."""

from __future__ import annotations

import pytest

from kerasps.step.layout import gathered


def spread() -> None:
    """From now on, have small variables stay where they are while steps are in flight."""
    gathered.MAX_BYTES = -1


def keep_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small variables stay where they are until the end of a test."""
    monkeypatch.setattr(gathered, "MAX_BYTES", -1)
