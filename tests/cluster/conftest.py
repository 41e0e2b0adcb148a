"""For all sessions: where small variables and tables are, and how values travel."""

from __future__ import annotations

import zlib

import pytest

from kerasps.step.records import specs
from kerasps.variables.rows import row_pools
from kerasps.variables.rows.row_pools import RowPools
from support.spread import keep_spread


@pytest.fixture(autouse=True)
def small_variables(request, monkeypatch):
    """Has small variables be on all ps in about every other test, by its name; else on one."""
    if zlib.crc32(request.node.name.encode()) % 2:
        keep_spread(monkeypatch)


@pytest.fixture(autouse=True)
def no_tables_before(request, monkeypatch):
    """Has no table of an earlier test count, however long Python leaves it: where a new one is
    stored depends on how many there are.
    """
    if "strategy" in request.fixturenames:
        strategy = request.getfixturevalue("strategy")
        pools = RowPools(strategy.options.table_min_bytes)
        monkeypatch.setattr(strategy.extended, "row_pools", pools)


@pytest.fixture(autouse=True)
def shared_storages(request, monkeypatch):
    """Has tables share storages in about every other test, by its name, however few they are."""
    if zlib.crc32(request.node.name[::-1].encode()) % 2:
        monkeypatch.setattr(row_pools, "NUM_SEPARATE", 0)


@pytest.fixture(autouse=True)
def large_values(request, monkeypatch):
    """Has values travel as they are in about every third test, by its name, however small."""
    if zlib.crc32(request.node.name.encode()) % 3 == 0:
        monkeypatch.setattr(specs, "LARGE_BYTES", 32)
