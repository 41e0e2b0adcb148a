"""Whatever is killed when, each ps applies each update once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("applied_once.py")


@pytest.mark.parametrize(
    ("kills", "num_shards"),
    [
        pytest.param(4, 2, id="on both ps"),
        pytest.param(5, 2, marks=pytest.mark.matrix, id="on both ps, more kills"),
        pytest.param(3, 1, marks=pytest.mark.matrix, id="small variables on one"),
    ],
)
def test_every_update_is_applied_once_when_workers_are_killed_at_random(kills, num_shards):
    report = run_and_report(SCRIPT, "--kills", kills, "--seed", 3, "--num-shards", num_shards)
    assert report["problems"] == []
    assert report["kills"] >= kills


@pytest.mark.matrix
@pytest.mark.parametrize(
    "arguments",
    [{"max_staleness": 3}, {"overlap": True}],
    ids=str,
)
def test_so_it_is_however_far_workers_may_drift(arguments):
    report = run_and_report(SCRIPT, "--kills", 5, "--seed", 4, "--arguments", json.dumps(arguments))
    assert report["problems"] == []
    assert report["kills"] >= 5
