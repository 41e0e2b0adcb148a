"""For all sessions: where small variables are while steps are in flight, and where tables are."""

from __future__ import annotations

import zlib

import pytest

from kerasps.variables import row_pools
from support.spread import keep_spread


@pytest.fixture(autouse=True)
def small_variables(request, monkeypatch):
    """Has steps go to all ps in about every other test, by its name, and in the rest to one."""
    if zlib.crc32(request.node.name.encode()) % 2:
        keep_spread(monkeypatch)


@pytest.fixture(autouse=True)
def shared_storages(request, monkeypatch):
    """Has tables share storages in about every other test, by its name, however few they are."""
    if zlib.crc32(request.node.name[::-1].encode()) % 2:
        monkeypatch.setattr(row_pools, "NUM_APART", 0)
