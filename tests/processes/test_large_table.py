"""A table of 4 million rows with Adam, 1.5 GB on the ps: the coordinator and the network see rows
of it only.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("large_table.py")
TABLE_BYTES = 4_000_000 * 32 * 4


@pytest.fixture(scope="module")
def report(once):
    return once("large-table", lambda: run_and_report(SCRIPT))


def test_the_coordinator_never_holds_the_table(report):
    assert report["grew_by_creating"] < 100e6
    assert report["grew_by_training"] < 150e6


def test_shards_and_slots_lie_on_both_ps(report):
    assert [shape for _, shape in report["shards"]] == [[2_000_000, 32], [2_000_000, 32]]
    assert len({device for device, _ in report["shards"]}) == 2
    assert min(report["bytes"]) >= 3 * TABLE_BYTES / 2
    assert max(report["bytes"]) < 1.1 * sum(report["bytes"]) / 2


def test_rows_are_initialised_and_trained(report):
    assert 0.02 < report["std"] < 0.04  # uniform in (-0.05, 0.05)
    assert report["loss"][1] < report["loss"][0]


def test_a_step_reads_no_more_than_its_rows(report):
    # 416 ids of 128 bytes in a step, and some dense variables.
    assert sum(report["bytes_read"]) < 416 * 128 + 20_000
