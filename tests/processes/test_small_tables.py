"""Variables that are looked up and small are read whole, and updated as in plain Keras."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("small_tables.py")


# Under these, rows without a gradient move: what is not Keras's own update shows.
NAMES = ["lamb", "momentum", "lion", "adam"]


@pytest.mark.parametrize(
    ("shards", "optimizers"),
    [
        (2, ["momentum", "adam"]),
        pytest.param(1, NAMES, marks=pytest.mark.matrix),
        pytest.param(2, NAMES[1:], marks=pytest.mark.matrix),  # Lamb is refused in shards
    ],
)
def test_small_tables_are_read_whole_and_equal_plain_keras(shards, optimizers):
    report = run_and_report(SCRIPT, shards, *optimizers)
    assert report["equal"] == optimizers
    assert len(report["tables"]) == len(optimizers)
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
