"""What models that are gone leave on the tasks: nothing that adds up.

`tox -e soak` is the long version, with many steps.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("lasting_training.py")


@pytest.mark.matrix
@pytest.mark.parametrize("scenario", ["models", "varied"])
def test_models_in_turn_leave_nothing_that_adds_up(scenario):
    # Each model would leave 3 MB on each worker, 4 on the ps and 10 threads. A worker that meets an
    # execution for the first time grows too, which depends on who was free when: so what counts is
    # by how much a process grows at nearly every model, which is the lower quartile.
    samples = run_and_report(SCRIPT, scenario, "--warm-up", 3, "--count", 8, "--samples", 8)[
        "samples"
    ]
    assert len(samples) == 9
    limits = {"megabytes": 1, "threads": 0, "files": 0}
    for name in samples[0].keys() - {"done", "seconds"}:
        for key, limit in limits.items():
            grown = [
                after[name][key] - before[name][key]
                for before, after in itertools.pairwise(samples)
            ]
            assert statistics.quantiles(grown, n=4)[0] <= limit, (name, key, grown)


@pytest.mark.matrix
def test_new_ids_without_end_leave_nothing():
    # 4 million ids, 4,000 new ones a step, in tables of 100,000 rows. Eight bytes for each id would
    # be 32 MB.
    counts = ("--max-rows", 100_000, "--warm-up", 1_000_000, "--count", 4_000_000)
    samples = run_and_report(SCRIPT, "rows", *counts, "--samples", 4)["samples"]
    for name in samples[0].keys() - {"done", "seconds"}:
        first, last = samples[0][name], samples[-1][name]
        assert last["megabytes"] - first["megabytes"] < 20, (name, samples)
        assert last["threads"] <= first["threads"]
