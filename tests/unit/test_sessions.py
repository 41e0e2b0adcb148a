"""Tests that need two clusters are refused before the first one starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.sessions import CLUSTERS, TESTS, refuse_two_clusters


@pytest.mark.parametrize(
    "paths",
    [
        ["smoke", "cluster/one_worker/test_fit.py"],
        ["cluster"],
        ["."],
        ["unit", "cluster/scripts", "cluster/two_workers"],
    ],
)
def test_two_clusters_in_one_session_are_refused_with_the_command_to_use(paths):
    with pytest.raises(pytest.UsageError, match=r"Run `python tests/run\.py tests/") as caught:
        refuse_two_clusters([TESTS / path for path in paths])
    received = str(caught.value).partition("Received: ")[2].partition(". Run")[0].split()
    assert 1 < len(received) <= len(CLUSTERS)
    assert all((TESTS.parent / folder).is_dir() for folder in received)


@pytest.mark.parametrize(
    "paths", [["unit"], ["unit", "smoke"], ["cluster/scripts", "cluster/scripts"], ["processes"]]
)
def test_one_cluster_in_a_session_is_not_refused(paths):
    refuse_two_clusters([TESTS / path for path in paths])


def test_pytest_ends_with_the_message():
    # Files that are not there, beside a folder that is, whose conftest.py imports nothing more.
    asked = ["tests/support", "tests/smoke/none.py", "tests/cluster/one_worker/none.py::test"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *asked]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "Run `python tests/run.py tests/cluster/one_worker tests/smoke`" in done.stderr
