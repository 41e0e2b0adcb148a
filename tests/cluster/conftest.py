"""For all sessions with two ps: where small variables are while steps are in flight."""

from __future__ import annotations

import zlib

import pytest

from support.spread import keep_spread


@pytest.fixture(autouse=True)
def small_variables(request, monkeypatch):
    """Has steps go to all ps in about every other test, by its name, and in the rest to one."""
    if zlib.crc32(request.node.name.encode()) % 2:
        keep_spread(monkeypatch)
