"""Variables that are looked up and small are read whole, and updated as in plain Keras."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).with_name("small_tables.py")


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_small_tables_are_read_whole_and_equal_plain_keras(shards):
    report = run_and_report(SCRIPT, shards, timeout_s=230)
    assert report["equal"] == ["lamb", "momentum", "lion", "adam"]
    assert len(report["tables"]) == 5 - shards
    assert all(report["tables"])
    (tables, small) = report["last"]
    assert len(tables) == 1
    assert len(small) == 3
    assert "looked up, and whole for being small: " in report["printed"]
    assert "by rows: " in report["printed"]
    assert "has 50 rows" in report["out_of_range"]
    assert report["unchanged"]
    assert report["compiled"] == 10
    assert len(report["refused"]) == 4
    for text in report["refused"]:
        assert "Argument `table_min_bytes` is not a number of bytes" in text
