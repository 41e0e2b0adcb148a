"""Some tests of a shared cluster once more, on other clusters. A process makes one strategy, of one
layout and kind of updates.

Each is a session of its own in a process of its own, and both of pytest-xdist's processes start one
at a time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.matrix import with_matrix

TESTS = Path(__file__).resolve().parents[1]

OTHERS = {
    "dealt out in blocks over three ps": (
        {"NUM_PS": "3", "SHARD_LAYOUT": "div"},
        "cluster/one_worker/test_tables.py",
        "bit_equal and adagrad-3 or several and adam-2",
    ),
    "dense updates on one ps": (
        {"NUM_PS": "1", "SPARSE_UPDATES": "dense"},
        "cluster/one_worker/test_tables.py",
        "lazy_update and adam-1",
    ),
    "three workers": (
        {"NUM_WORKERS": "3"},
        "cluster/two_workers/test_inputs.py",
        "one_pass and not in_order and not unknown and not tensors",
    ),
}
AT_LENGTH = {
    name: (*OTHERS[name][:2], selection)
    for name, selection in {
        "dealt out in blocks over three ps": "bit_equal or several",
        "dense updates on one ps": "lazy_update and (adam-1 or adam-3 or lion or ftrl)",
    }.items()
}


@pytest.mark.parametrize(
    "name",
    with_matrix(OTHERS, at_length=["dealt out in blocks over three ps", "three workers"]),
)
def test_the_same_holds_on_another_cluster(name):
    check(*OTHERS[name])


@pytest.mark.matrix
@pytest.mark.parametrize("name", AT_LENGTH)
def test_more_of_the_same_holds_on_another_cluster(name):
    check(*AT_LENGTH[name])


def check(choices, path, selection):
    """Run the tests of a file that are selected, on a cluster of these choices."""
    # Not the parent's own settings of pytest and of pytest-xdist.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {f"KERASPS_TEST_{key}": value for key, value in choices.items()}
    command = [sys.executable, "-m", "pytest", "-q", str(TESTS / path), "-k", selection]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE)
