"""What models that are gone leave on the tasks: nothing that adds up. `tox -e soak` is the long version, with many steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_checks import run_and_report

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("lasting_training.py")


def growth(*arguments):
    """By how much each process has grown, from the first to the last sample."""
    samples = run_and_report(SCRIPT, *arguments)["samples"]
    first, last = samples[0], samples[-1]
    names = [name for name in first if name != "done"]
    return {name: {key: last[name][key] - first[name][key] for key in last[name]} for name in names}


def check(grown, megabytes, threads, files):
    for name, by in grown.items():
        assert by["megabytes"] <= megabytes, (name, grown)
        assert by["threads"] <= threads, (name, grown)
        assert by["files"] <= files, (name, grown)


def test_models_in_turn_leave_nothing_that_adds_up():
    # Of 8 models, 24 MB would stay on each worker and 32 on the ps, and 80 threads on each worker.
    check(growth("models", "--warm-up", 3, "--count", 8), megabytes=10, threads=8, files=8)
